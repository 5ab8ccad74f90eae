"""The weight files of a Hugging Face folder: finding them, and reading them tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from glm_multiuser.checkpoint.json_file import read_json_object
from glm_multiuser.checkpoint.safetensors_file import open_safetensors
from glm_multiuser.checkpoint.stored_tensor import Array, StoredTensor
from glm_multiuser.checkpoint.torch_file import open_torch
from glm_multiuser.errors import CheckpointError

WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"


@dataclass(frozen=True)
class Format:
    """A way to keep weights in a folder."""

    single: str
    """The one file, or else there are several and an index."""
    open: Callable[[Path], dict[str, StoredTensor]]

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has weights in this format."""
        return (folder / self.single).exists() or (folder / self.index).exists()


SAFETENSORS = Format(WEIGHTS, open_safetensors)
TORCH = Format(TORCH_WEIGHTS, open_torch)


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights that `open_folder` is for; shards without index are some."""
    return any(one.is_in(folder) for one in (SAFETENSORS, TORCH)) or bool(_shards(folder))


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of a folder's weight files, and reads no weights.

    If there are both safetensors and pytorch_model*.bin, the latter are not looked at.

    Raises:
        CheckpointError: no weight file, one that is missing, broken or cut short, or a tensor
            that is not stored as floating-point numbers.
    """
    folder = Path(folder)
    for one in (SAFETENSORS, TORCH):
        if (folder / one.single).exists():
            return one.open(folder / one.single)
        if (folder / one.index).exists():
            return _open_shards(folder / one.index, one.open)
    if _shards(folder):
        raise CheckpointError(
            f"{folder} has {_shards(folder)[0]} and no index: neither {SAFETENSORS.index} nor "
            f"{TORCH.index} is there"
        )
    raise CheckpointError(
        f"no weights in {folder}: none of {WEIGHTS}, {SAFETENSORS.index}, {TORCH_WEIGHTS}, "
        f"{TORCH.index}, *.ckpt is there"
    )


def read_tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Reads every tensor of a folder, one at a time, in the checkpoint's own names and layouts.

    Yields:
        Name and values; float16, float32 or float64 mapped from the file, bfloat16 as float32.

    Raises:
        CheckpointError: see `open_folder`.
    """
    for name, tensor in open_folder(folder).items():
        yield name, tensor.read()


def _shards(folder: Path) -> list[str]:
    patterns = ("model-*.safetensors", "pytorch_model-*.bin")
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _open_shards(
    index: Path, open_file: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"weight_map in {index} is {shard_of!r}; it must name the tensors")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard == "..":
            raise CheckpointError(f"{index} has {name} in {shard!r}, which is not a file beside it")
        if shard not in shards:
            if not index.with_name(shard).exists():
                raise CheckpointError(f"{index} names {shard}, which is not there")
            shards[shard] = open_file(index.with_name(shard))
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index} has {name} in {shard}, but that file has no such tensor"
            )
        tensors[name] = shards[shard][name]
    return tensors
