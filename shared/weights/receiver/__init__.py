"""The pulling side: the control connection (``puller``), and the ranks that receive buckets (``receiver``)."""
