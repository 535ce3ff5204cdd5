"""Environment of processes that run untrusted code or read untrusted text: how to find Python, no credentials or
settings.
"""

FOR_PYTHON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TMPDIR")
"""Variables that are passed on."""
