"""One file for each loss of ``[algorithm]``, under the name that it has there (a function of one's own: ``own``).

Its function ``kind`` returns what batches it learns from (``kinds``), with its formula in it. ``shared/settings/rules.py``
says which settings it takes; a new loss is an entry there and a file here.
"""
