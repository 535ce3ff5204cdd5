"""Environment of processes with untrusted code or text: no credentials or settings."""

FOR_PYTHON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TMPDIR")
