"""Rank 0's duties on the bus and around checkpoints, on the event loop beside the training thread.

::

    experience ──▶ intake ──▶ driver ──▶ commands, mailbox ──▶ training thread of rank 0 ──▶ all ranks
                                │                                   └──▶ publication, artifacts
              resume, opening ──┤      after a start or a rollback
                                ├──▶ branch ──▶ ledger: commit
                                └──▶ retention       checkpoints
"""
