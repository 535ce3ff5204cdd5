"""What a process that must know nothing of ours is told of our environment: how to find its Python, and nothing else.

Neither credentials nor settings pass: what runs untrusted code, or reads untrusted text, starts with these variables alone.
"""

FOR_PYTHON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TMPDIR")
"""The names of the variables that pass."""
