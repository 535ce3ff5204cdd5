"""One file for each loss of ``[algorithm]``, under the name that it has there (a function of one's own: ``own``).

Its function ``loss`` is the formula for the tokens that a policy drew, or its class ``Batches`` says what other batches it
learns from (``kinds``). ``shared/settings/rules.py`` says which settings it takes; a new loss is an entry there and a file
here.
"""
