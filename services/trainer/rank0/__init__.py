"""Rank 0's duties: everything that only the leading rank does, on the bus and with checkpoints.

experience ──▶ intake ──▶ lead ──▶ commands ──▶ all ranks train
                            │
          resume, opening ──┤      after a start or a rollback
                            ├──▶ publication ──▶ branch ──▶ ledger: commit
                            └──▶ retention                  checkpoints
"""
