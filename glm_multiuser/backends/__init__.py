"""Two implementations of the cells that models are made of.

`native/` has C++ kernels for the CPU; `portable/` uses MindSpore's operators, which run on any
device. A model gets its cells from its `Backend` and does not know which one it is.
"""
