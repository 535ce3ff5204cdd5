"""The life of a run: who leads, when it starts, pauses and ends, and what guards it.

leader_lease ──▶ lifecycle ◀── commands (people), guards (metrics)
                     │
                  monitor ──▶ notices
"""
