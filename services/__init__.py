"""The four services and their command line; each service starts with `python -m services.<name> --config run.toml`."""
