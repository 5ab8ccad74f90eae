"""Prints a checksum of each product on tiles, with the library that `calling.py` finds."""

from __future__ import annotations

from hashlib import sha256
from itertools import product

from tests.kernels.calling import bits, native
from tests.kernels.test_linear import Product

KINDS = ("bfloat16", "int8", "bfloat16, inputs bfloat16", "int8, inputs int8")
SHAPES = ((1, 64, 32), (1, 1027, 45), (5, 77, 45), (17, 576, 100), (33, 1536, 64), (70, 129, 33))
"""Rows, inputs, outputs."""
FACTORS = (1.0, 1e-20, 1e15, 1e-37)

if __name__ == "__main__":
    if not native().glm_force_level(b"amx"):
        raise SystemExit("this processor, or this build, has no amx")
    for kind, shape, factor in product(KINDS, SHAPES, FACTORS):
        each = Product.random("linear", kind, *shape)
        each.x *= factor
        print(kind, shape, factor, sha256(bits(each.run())).hexdigest())
