"""Records of what takes a while, and dead letters: both are kept on the bus and answered by the API."""
