"""Sandbox side: the warm interpreter, the confinement of its children, and the program.

Standard library only (3.10 or newer): the interpreter may be a different one that sees no other folder of Penstock,
hence the relative imports.
"""
