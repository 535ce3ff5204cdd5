"""What runs on the other side: the warm interpreter, the confinement of its children, and the program.

These modules need the standard library (3.10 or newer) and nothing of Penstock: the interpreter that runs programs may be another
one, and sees no other folder of Penstock. Hence their relative imports.
"""
