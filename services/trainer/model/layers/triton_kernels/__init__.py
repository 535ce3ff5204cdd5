"""This package's Triton kernels, imported only where a GPU uses them."""
