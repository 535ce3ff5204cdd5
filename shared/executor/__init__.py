"""The protocol of the code executor, and its client."""
