"""The run among others: owner, registry and leader lease; its records; operations and stored answers of the API."""
