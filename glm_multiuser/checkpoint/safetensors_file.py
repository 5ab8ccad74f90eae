"""Indexes and writes `.safetensors` files.

The file is the header's length in 8 bytes, little-endian, the header, and the tensors. The header
is JSON, `{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, with offsets from its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from glm_multiuser.checkpoint.files import reading, replacing
from glm_multiuser.checkpoint.stored_tensor import (
    ALL_DTYPES,
    DTYPES,
    Array,
    Sizes,
    StoredTensor,
    byte_size,
    not_floating,
)
from glm_multiuser.errors import CheckpointError


def open_safetensors(path: Path, quantised: bool = False) -> dict[str, StoredTensor]:
    """Finds the tensors of a file, without reading weights.

    Raises:
        CheckpointError: an unreadable, broken or truncated file; a tensor that is not stored as
            floating-point numbers or, with `quantised`, as int32.
    """
    known = ALL_DTYPES if quantised else DTYPES
    try:
        with reading(path):
            # Checks the header, and that its tensors fill the file exactly ...
            with safe_open(path, framework="numpy"):
                pass
            # ... but knows neither bfloat16 nor a way to read without copying.
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is broken, cut short or not a safetensors file: {error}"
        ) from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in known:
            raise not_floating(name, path, entry["dtype"])
        begin, end = entry["data_offsets"]
        parts = ((8 + length + begin, end - begin),)
        tensors[name] = StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), parts)
    return tensors


def save_safetensors(path: Path, sizes: Sizes, arrays: Iterable[tuple[str, Array]]) -> None:
    """Writes a file that transformers can read, complete or not at all.

    `safetensors.numpy.save_file` writes the same file, but needs all arrays at once. Here they
    arrive one at a time, in any order; `sizes` has exactly these tensors.
    """
    # Larger types first, so that every tensor is aligned to its item size.
    names = sorted(sizes, key=lambda name: (-sizes[name][1].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype = sizes[name]
        begin, end = end, end + byte_size(shape, dtype)
        stored_as = next(ours for ours, numpy in DTYPES.items() if numpy == dtype)
        header[name] = {"dtype": stored_as, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, values in arrays:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            flat = np.ascontiguousarray(values, sizes[name][1]).reshape(-1)
            file.write(flat.view(np.uint8).data)
        file.truncate(8 + len(text) + end)
