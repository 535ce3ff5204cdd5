"""Common parts of every service's process: flags, signals, heartbeat, metrics, logs."""
