"""The kernels as instructions of a program.

Each takes `used`, int32 [1]: how many of its rows are valid in this step. The rows after them are
neither read nor written. `cpu/*operator*.cpp` document all inputs.
"""

from __future__ import annotations

from glm_multiuser.backends.native.program import Kernel


def linear(name: str) -> Kernel:
    """(x [rows, in], used, weight, bias [out]) -> [rows, out]. `name` is "linear", or "linear_add",
    which also takes (residual [rows, out], factor [1]); with "_bfloat16" or "_int8" appended, x is
    rounded to that type. x may be packed inputs of this product."""
    return Kernel(name, lambda x, used, weight, bias, *rest: [(x[0], bias[0])])


def linear_gelu(name: str, row_bytes: int) -> Kernel:
    """(x [rows, in], used, weight, bias [out], weight of the next product) -> packed inputs
    [rows, out] of that product, `row_bytes` per row, after a GELU."""
    shapes = lambda x, used, weight, bias, following: [(x[0], bias[0])]  # noqa: E731
    return Kernel(name, shapes, ("uint8",), row_bytes)


def embedding(width: int) -> Kernel:
    """(ids int32 [rows], used, weight, (vocabulary, width) int32 [2]) -> [rows, width]."""
    return Kernel("embedding", lambda ids, *rest: [(ids[0], width)])


take_rows = Kernel("take_rows", lambda x, indices, used: [(indices[0], x[1])])
"""(x [rows, size], indices int32 [taken], used) -> those rows [taken, size]."""

layer_norm = Kernel("layer_norm", lambda x, *rest: [x])
"""(x [rows, size], used, gamma, beta, epsilon [1], optional residual like x) -> like x."""

layer_norm_of_layer = Kernel(
    "layer_norm_of_layer", lambda x, *rest: [x, (1,)], ("float32", "int32")
)
"""(x [rows, size], plan int32 [4], layer int32 [1], saved [*, size], gamma, beta, epsilon [1]) ->
([rows, size], used int32 [1])."""

rms_norm = Kernel("rms_norm", lambda x, *rest: [x])
"""(x [rows, size], used, weight, epsilon [1], optional residual like x) -> [rows, size]."""

query_key_norm = Kernel("query_key_norm", lambda x, *rest: [x])
"""(x [rows, columns], used, query weight, key weight [head_dim], epsilon [1], heads int32 [2]) ->
[rows, columns]."""


def swiglu(name: str, row_bytes: int) -> Kernel:
    """(gate and up [rows, 2 * size], used, weight of the next product) -> packed inputs
    [rows, size] of that product, `row_bytes` per row; `name` has the suffix of that product, which
    is the type that they are rounded to."""
    return Kernel(name, lambda x, used, following: [(x[0], x[1] // 2)], ("uint8",), row_bytes)


next_token = Kernel(
    "next_token", lambda hidden, *rest: [(hidden[0],), (hidden[0],)], ("int32", "float32")
)
"""(hidden [rows, hidden_size], logits [rows, vocab_size], used) -> argmax of the logits, int32
[rows]; 0 if the row is finite, otherwise NaN, [rows]."""


def attention(width: int) -> Kernel:
    """(queries, keys and values [rows, columns], used, users, positions, angles, cosine, sine,
    partner, settings, scale, then keys and values of each cell) -> [rows, width]."""
    return Kernel("attention", lambda x, *rest: [(x[0], width)])
