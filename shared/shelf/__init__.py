"""Shelves: large payloads stay in files of the replicas, and the bus carries claims for them.

::

    put(payload)  ──▶ own file ──▶ copies on other replicas, another host's first ──▶ Claim, or None: the bus carries it
    fetch(Claim)  ──▶ own file, else a holder's, checked by SHA-256 ──▶ payload, or ShelfLost
    sweep         ──▶ files of groups that are neither in flight, nor in the journal, nor dead letters are deleted
"""
