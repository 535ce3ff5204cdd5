"""The coordinator: admission, policy ledger, run state, HTTP API and records."""
