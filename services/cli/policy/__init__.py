"""Commands that use policies: ``chat``, ``eval`` and ``push``.

::

    commands ──▶ chat, evaluate, push ──▶ penstock.services.client     the live policy
                                     └──▶ penstock.services.offline    a stored one, on this machine
"""
