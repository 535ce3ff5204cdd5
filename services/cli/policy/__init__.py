"""Commands that use policies: ``chat``, ``eval`` and ``push``.

::

    commands ──▶ chat, evaluate, push ──▶ services.client     the live policy
                                     └──▶ services.offline    a stored one, on this machine
"""
