"""The kernels as operators of a graph.

Each takes, among its inputs, `used`, int32 [1]: how many of its rows there are in this step. What
lies behind them is neither read nor written. `cpu/operators.cpp` says what each input is.
"""

from __future__ import annotations

from typing import Any, Callable

import mindspore as ms
from mindspore import ops

from glm_multiuser.backends.native import library


def operator(name: str, shape: Callable[..., Any], dtype: Any = ms.float32) -> ops.Custom:
    """The operator `name` of the library; `shape` makes its output's from those of its inputs."""
    return ops.Custom(f"{library.path()}:{name}", shape, lambda *dtypes: dtype, "aot")


def linear(finish: str = "linear") -> ops.Custom:
    """(x [rows, in], used, weight, bias [out]) -> [rows, out]; `finish` may be "linear_gelu", or
    "linear_add" with (residual [rows, out], factor [1]) more; with "_bfloat16" behind it, x is
    rounded to bfloat16."""
    return operator(finish, lambda x, used, weight, bias, *rest: [x[0], bias[0]])


def embedding(width: int) -> ops.Custom:
    """(ids int32 [rows], used, weight, (vocabulary, width) int32 [2]) -> [rows, width]."""
    return operator("embedding", lambda ids, *rest: [ids[0], width])


def layer_norm() -> ops.Custom:
    """(x [rows, size], used, gamma, beta, epsilon [1], perhaps a residual like x) -> like x."""
    return operator("layer_norm", lambda x, *rest: x)


def layer_norm_of_layer() -> ops.Custom:
    """(x [rows, size], plan int32 [4], layer int32 [1], saved [*, size], gamma, beta, epsilon [1])
    -> ([rows, size], used int32 [1])."""
    return operator("layer_norm_of_layer", lambda x, *rest: (x, [1]), (ms.float32, ms.int32))


def rms_norm() -> ops.Custom:
    """(x [rows, size], used, weight, epsilon [1], perhaps a residual like x) -> [rows, size]."""
    return operator("rms_norm", lambda x, *rest: x)


def query_key_norm() -> ops.Custom:
    """(x [rows, columns], used, query weight, key weight [head_dim], epsilon [1], heads int32 [2])
    -> [rows, columns]."""
    return operator("query_key_norm", lambda x, *rest: x)


def swiglu() -> ops.Custom:
    """(gate and up [rows, 2 * size], used) -> [rows, size]."""
    return operator("swiglu", lambda x, used: [x[0], x[1] // 2])


def next_token() -> ops.Custom:
    """(hidden [rows, hidden_size], logits [rows, vocab_size], used) -> the best tokens, int32
    [rows]; 0 where the row is finite and NaN where not, [rows]."""
    return operator(
        "next_token", lambda hidden, *rest: ([hidden[0]], [hidden[0]]), (ms.int32, ms.float32)
    )


def attention(width: int) -> ops.Custom:
    """(queries, keys and values [rows, columns], used, users, positions, angles, cosine, sine,
    partner, settings, scale, then keys and values of each cell) -> [rows, width]."""
    return operator("attention", lambda x, *rest: [x[0], width])
