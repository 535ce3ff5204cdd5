"""The pulling side of weight transfers."""
