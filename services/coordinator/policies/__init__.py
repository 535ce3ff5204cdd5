"""The policy's history: promotion to head, relay of weights, rollback, lineage and exports."""
