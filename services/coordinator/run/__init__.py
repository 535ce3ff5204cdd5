"""The run's lifecycle: leadership, states and guards.

leader_lease ──▶ lifecycle ◀── commands (people), guards (metrics)
                     │
                  monitor ──▶ notices
"""
