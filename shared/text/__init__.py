"""Text that others see: secrets are removed, and characters that steer a terminal are escaped."""
