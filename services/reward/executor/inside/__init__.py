"""Sandbox side: the warm interpreter, the confinement of its children, and the program.

Standard library only (3.10 or newer) and relative imports, because the interpreter sees no other folder of Penstock.
"""
