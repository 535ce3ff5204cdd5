"""The pulling side: control connection (``puller``) and receiving ranks (``receiver``)."""
