"""Hand-written Triton kernels, one execution form a module: the ``@triton.jit`` functions and a thin launch function.

A launch function takes tensors by duck type, allocates nothing, never synchronises and can be captured in a CUDA graph.
Nothing here imports torch or the rest of flowlib; the compiler names these modules by import string.
"""
