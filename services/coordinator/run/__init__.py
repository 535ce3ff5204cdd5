"""The run's lifecycle.

leader_lease ──▶ lifecycle ◀── commands, guards
                     │
                  monitor ──▶ notices
"""
