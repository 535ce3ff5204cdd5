"""The coordinator: admission, policy ledger, run state, HTTP API, records of the run."""
