"""The frame of every service's process: flags, signals, heartbeat, metrics, logs and files."""
