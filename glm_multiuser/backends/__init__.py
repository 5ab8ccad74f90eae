"""The cells that a model is made of, from two sources that compute the same.

`native/` has our own kernels, for the CPU; `portable/` has MindSpore's operators, which run on any
device. A model asks its `Backend` for cells and never which one it is.
"""
