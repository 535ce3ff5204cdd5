"""The four services and their command line; each service starts with `python -m penstock.services.<name> --config run.toml`."""

if __name__ != "penstock.services":
    raise ImportError("import penstock.services: `services` is its folder")
