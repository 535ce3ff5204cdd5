"""The endpoint at which agents ask the policy, in the dialects of their SDKs."""
