"""Operators of our own for the CPU: products with packed weights, and attention over every user's
own cache. The C++ sources are in `cpu/`; an installation builds them into `native.so`."""
