"""Prints checksums of tile products and of attention, with the library found by `calling.py`."""

from __future__ import annotations

from hashlib import sha256
from itertools import product

from tests.kernels.attention_step import Shape, Step, Token, random_cache
from tests.kernels.calling import bits, native
from tests.kernels.group_weights import DTYPES
from tests.kernels.test_groups import Product as GroupProduct
from tests.kernels.test_linear import Product

KINDS = ("bfloat16", "int8", "bfloat16, inputs bfloat16", "int8, inputs int8")
SHAPES = ((1, 64, 32), (1, 1027, 45), (5, 77, 45), (17, 576, 100), (33, 1536, 64), (70, 129, 33))
"""Rows, inputs, outputs."""
FACTORS = (1.0, 1e-20, 1e15, 1e-37)

ROWS = (1, 5, 6, 40)
"""Times weights in groups."""

HEADS = ((1, 64), (2, 80), (7, 20))
"""Query heads per KV head, head dimension."""
TOKENS = (1, 3, 40)


def attended(group: int, head_dim: int, count: int, factor: float) -> bytes:
    """Contexts of the last tokens of a prompt. No rotary embedding, which uses no tiles."""
    shape = Shape(kv_heads=2, group=group, head_dim=head_dim, cache="bfloat16")
    tokens = [Token(0, place, place + 1, (0,)) for place in range(150, 150 + count)]
    step = Step.random(shape, tokens, seed=count)
    step.cosine[...], step.sine[...] = 1, 0
    step.query *= factor
    step.value *= factor
    return bits(step.run([random_cache(shape, 200, 150, seed=1)]))


if __name__ == "__main__":
    if not native().glm_force_level(b"amx"):
        raise SystemExit("this processor, or this build, has no amx")
    for kind, shape, factor in product(KINDS, SHAPES, FACTORS):
        each = Product.random("linear", kind, *shape)
        each.x *= factor
        print(kind, shape, factor, sha256(bits(each.run())).hexdigest())
    for dtype, inputs, rows, factor in product(DTYPES, ("", "_bfloat16"), ROWS, FACTORS):
        in_groups = GroupProduct.random(f"linear{inputs}", dtype, rows, 5, 45)
        in_groups.x *= factor
        print(dtype, inputs, rows, factor, sha256(bits(in_groups.run())).hexdigest())
    for (group, head_dim), count, factor in product(HEADS, TOKENS, FACTORS):
        found = attended(group, head_dim, count, factor)
        print("attention", group, head_dim, count, factor, sha256(found).hexdigest())
