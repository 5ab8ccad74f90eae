"""Indexes PyTorch's `.bin` files, through torch.

The file is a zip archive of a pickle, which lists the tensors, and of their data. torch unpickles
it with `weights_only=True`, so code named in a pickle is rejected and never runs; the data stays
in the file, which torch maps.
"""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np

from glm_multiuser.checkpoint.files import reading
from glm_multiuser.checkpoint.stored_tensor import StoredTensor, not_floating
from glm_multiuser.errors import CheckpointError

OUR_DTYPES = {f"torch.float{bits}": f"F{bits}" for bits in (16, 32, 64)}
OUR_DTYPES["torch.bfloat16"] = "BF16"
"""torch's dtype name -> `StoredTensor`'s."""

BROKEN = "broken, cut short or not a file of torch.save from torch 1.6 on"


def open_torch(path: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of a file, without reading weights.

    Raises:
        CheckpointError: an unreadable, broken or truncated file, one in the format from before
            torch 1.6, or one that would run code; a tensor that is not stored as floating-point
            numbers; torch is not installed.
    """
    try:
        import torch  # late: an extra, and slow to import
    except ImportError as error:
        raise CheckpointError(
            f"{path} needs torch to be read: pip install 'glm-multiuser[torch]' ({error})"
        ) from error
    with reading(path):
        _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        # torch's own message explains how to run such code anyway.
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"asks to run {code[1]}" if code else "holds something else than weights"
        raise CheckpointError(f"{path} {what}, which is refused") from error
    except Exception as error:  # a broken pickle can make torch raise anything
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is {BROKEN}: {first_line}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not tensors with names")
    return {name: _stored(name, path, tensor) for name, tensor in content.items()}


def _check_archive(path: Path) -> None:
    """Rejects entries that unpack to more than the file's size, which torch would read into memory;
    `torch.save` does not compress."""
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:
        raise
    except Exception as error:  # a broken archive can make zipfile raise anything
        raise CheckpointError(f"{path} is {BROKEN}") from error
    for entry in entries:
        if entry.compress_type != ZIP_STORED:
            raise CheckpointError(f"{entry.filename} in {path} is compressed; it must be stored")
    unpacked, size = sum(entry.file_size for entry in entries), path.stat().st_size
    if unpacked > size:
        raise CheckpointError(f"{path} has entries of {unpacked} bytes; the file has {size}")


def _stored(name: Any, path: Path, tensor: Any) -> StoredTensor:
    import torch

    if not isinstance(name, str):
        raise CheckpointError(f"the name {name!r} in {path} is no text")
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{name!r} in {path} is {type(tensor).__name__}, not a tensor")
    dtype = str(tensor.dtype)
    if tensor.layout != torch.strided or tensor.is_meta:
        dtype = f"{dtype} in {tensor.layout} on {tensor.device}"
    if dtype not in OUR_DTYPES:
        raise not_floating(name, path, dtype)
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{name} in {path} has shape {list(tensor.shape)}, and fewer numbers than that"
        )
    flat = tensor.detach().contiguous().view(-1)
    mapped: Any = np.empty(0, np.uint8) if flat.numel() == 0 else flat.view(torch.uint8).numpy()
    return StoredTensor(name, path, OUR_DTYPES[dtype], tuple(tensor.shape), mapped=mapped)
