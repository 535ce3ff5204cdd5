"""Policy history: promotion, weight relay, rollback, lineage and exports."""
