"""AWQ and GPTQ weights in a Hugging Face folder: three tensors per matrix become one int4 tensor.

Both have groups of inputs with a float16 scale and a zero point, as in `int4.py`, and pack eight
4-bit numbers into a 32-bit word. Layouts as in AutoAWQ (`awq/utils/packing_utils.py`) and AutoGPTQ
(`qlinear_cuda.py`), for [outputs, inputs] and groups of g inputs:

           qweight                 qzeros                      scales
    AWQ    [inputs, outputs / 8]   [inputs / g, outputs / 8]   [inputs / g, outputs]
    GPTQ   [inputs / 8, outputs]   [inputs / g, outputs / 8]   [inputs / g, outputs]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np

from glm_multiuser.checkpoint import int4
from glm_multiuser.checkpoint.stored_tensor import Array, StoredTensor
from glm_multiuser.errors import CheckpointError, ConfigError

WORD = 8
"""4-bit numbers per 32-bit word."""

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each 4 bits of an AWQ word hold, from the lowest bits."""

PARTS = ("qweight", "qzeros", "scales", "g_idx")

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""GPTQ format -> offset added to stored zero points."""


class Quantisation(NamedTuple):
    """The `quantization_config` of a `config.json`."""

    method: str
    """ "awq" or "gptq"."""
    group: int
    """Inputs."""
    zero_offset: int
    """Offset added to stored zero points."""


def read_quantisation(config: Mapping[str, Any]) -> Optional[Quantisation]:
    """Reads the content of a `config.json`; returns None for weights that are not quantised.

    Raises:
        ConfigError: an unsupported method or variant.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("quant_method") not in ("awq", "gptq"):
        raise ConfigError(f"quantization_config is {found!r}; its quant_method must be awq or gptq")
    method = found["quant_method"]
    wanted = {
        "bits": (4,),
        "version": ("gemm", None),
        "desc_act": (False, None),
        "rotation": (None, False, ""),
    }
    for key, values in wanted.items():
        value = found.get(key)
        if (value.lower() if isinstance(value, str) else value) not in values:
            raise ConfigError(f"quantization_config has {key} {value!r}; it must be {values[0]!r}")
    group = found.get("group_size")
    least = int4.SMALLEST_GROUP
    if type(group) is not int or group < least or group % least:
        raise ConfigError(
            f"quantization_config has group_size {group!r}; it must be a multiple of {least}"
        )
    return Quantisation(method, group, _zero_offset(found) if method == "gptq" else 0)


def _zero_offset(found: Mapping[str, Any]) -> int:
    key = "checkpoint_format" if found.get("checkpoint_format") else "format"
    value = found.get(key) or "gptq"
    name = str(value).lower()
    if name not in ZERO_OFFSETS:
        raise ConfigError(
            f"quantization_config has {key} {value!r}; with GPTQ it must be "
            f"{' or '.join(map(repr, ZERO_OFFSETS))}"
        )
    return ZERO_OFFSETS[name]


def join_tensors(
    tensors: Mapping[str, StoredTensor], quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Returns all tensors, with `name.qweight` and its other parts joined to one `name.weight`.

    Raises:
        CheckpointError: a missing part, or one of another shape or type.
    """
    found = {}
    modules = {name[: -len(".qweight")] for name in tensors if name.endswith(".qweight")}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if module in modules and part in PARTS:
            if part == "qweight":
                found[f"{module}.weight"] = _joined(module, tensors, quantisation)
        else:
            found[name] = tensor
    return found


def _joined(
    module: str, tensors: Mapping[str, StoredTensor], quantisation: Quantisation
) -> StoredTensor:
    weight = tensors[f"{module}.qweight"]
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    is_awq = quantisation.method == "awq"
    inputs, outputs = (rows, columns * WORD) if is_awq else (rows * WORD, columns)
    group = quantisation.group
    expected = {
        "qweight": ("I32", weight.shape),
        "qzeros": ("I32", (inputs // group, outputs // WORD)),
        "scales": ("F16", (inputs // group, outputs)),
    }
    order = tensors.get(f"{module}.g_idx")
    if order is not None:
        expected["g_idx"] = "I32", (inputs,)
    for part, (dtype, shape) in expected.items():
        tensor = tensors.get(f"{module}.{part}")
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape) or inputs % group:
            is_there = "is missing" if tensor is None else f"is {tensor.dtype} {[*tensor.shape]}"
            raise CheckpointError(
                f"{module}.{part} in {weight.path} {is_there}; "
                f"it must be {dtype} {[*shape]} beside qweight {[*weight.shape]}"
            )
    if order is not None and (order.read() != np.arange(inputs) // group).any():
        raise CheckpointError(f"{order.name} in {order.path}: inputs are not in their order")
    kept = int4.LARGEST_GROUP if group == int4.LARGEST_GROUP else int4.SMALLEST_GROUP
    parts = [tensors[f"{module}.{part}"] for part in PARTS[:3]]
    made = partial(_blocks, parts, quantisation, kept)
    name, block_type = f"{module}.weight", int4.block_type(kept)
    shape = (outputs, inputs)
    return StoredTensor(name, weight.path, "int4", shape, block_type=block_type, made=made)


def _blocks(
    parts: Sequence[StoredTensor], quantisation: Quantisation, kept: int, begin: int, end: int
) -> Array:
    """Returns outputs `begin` to `end` as uint8 [outputs, blocks, bytes], in groups of `kept`;
    `parts` are qweight, qzeros and scales."""
    weight, zeros, scales = parts
    words = slice(begin // WORD, -(-end // WORD))
    inside = slice(begin - words.start * WORD, end - words.start * WORD)
    order = AWQ_ORDER if quantisation.method == "awq" else IN_ORDER
    # Writers subtract 1 from all zero points in a whole word at once, so a zero point of 0 borrows
    # from the next one. This inverts `convert_gptq_v2_to_v1_format` of AutoGPTQ and GPTQModel.
    offset = np.uint32(0x11111111 * quantisation.zero_offset)
    points = _numbers(zeros.read()[:, words].view(np.uint32) + offset, order)[:, inside]
    if quantisation.method == "awq":
        numbers = _numbers(weight.read()[:, words], order)[:, inside]
    else:
        packed = _numbers(np.ascontiguousarray(weight.read()[:, begin:end].T), order)
        numbers = packed.T
    repeated = quantisation.group // kept
    points = np.repeat(points, repeated, axis=0).T.reshape(-1)
    steps = np.repeat(scales.read()[:, begin:end], repeated, axis=0).T.reshape(-1)
    groups = np.ascontiguousarray(numbers.T).reshape(-1, kept)
    return int4.make_blocks(groups, points, steps).reshape(end - begin, -1, int4.HEADER + kept // 2)


def _numbers(words: Array, order: tuple[int, ...]) -> Array:
    """int32 or uint32 [rows, words] -> uint8 [rows, 8 * words]."""
    rows, count = words.shape
    numbers = np.empty((rows, count, WORD), np.uint8)
    for place, number in enumerate(order):
        numbers[:, :, number] = words.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15)
    return numbers.reshape(rows, -1)
