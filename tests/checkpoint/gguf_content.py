"""The content of GGUF files, to be changed and written again."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glm_multiuser.checkpoint import load_checkpoint, read_generation_defaults, read_model_config
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.checkpoint.gguf.file import Strings, open_gguf
from glm_multiuser.tokenizers import load_tokenizer
from tests.golden_data import golden_folder

TYPES = {"F32": 0, "F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
ITEM_TYPES = {"<f4": 6, "<i4": 5, "<u4": 4, "|u1": 0, "|b1": 7}
ALIGNMENT = 32


def gguf_model(name: str) -> Path:
    """One of the reference models."""
    return golden_folder("gguf_models") / f"{name}.gguf"


@dataclass
class Tensor:
    name: str
    kind: int
    shape: tuple[int, ...]
    content: bytes


@dataclass
class Content:
    """What `write` writes; a value that is a pair is the number of its type, and its bytes."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> Content:
        """Only of tensors that are not in blocks of 256."""
        file = open_gguf(path)
        data = path.read_bytes()
        tensors = []
        for one in file.tensors.values():
            begin, length = one.parts[0]
            content = data[begin : begin + length]
            tensors.append(Tensor(one.name, TYPES[one.dtype], one.shape, content))
        metadata = {
            key: value.read() if isinstance(value, Strings) else value
            for key, value in file.metadata.items()
        }
        return cls(metadata, tensors)

    def tensor(self, name: str) -> Tensor:
        return next(one for one in self.tensors if one.name == name)

    def write(self, path: Path) -> Path:
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            header += string(key) + b"".join(_value(value))
        offset = 0
        for one in self.tensors:
            header += string(one.name) + struct.pack("<I", len(one.shape))
            header += struct.pack(f"<{len(one.shape)}Q", *one.shape[::-1])
            header += struct.pack("<IQ", one.kind, offset)
            offset += -(-len(one.content) // ALIGNMENT) * ALIGNMENT
        for one in self.tensors:
            header += bytes(-len(header) % ALIGNMENT) + one.content
        path.write_bytes(header)
        return path


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> tuple[bytes, bytes]:
    if isinstance(value, tuple):
        return struct.pack("<I", value[0]), value[1]
    if isinstance(value, bool):
        return struct.pack("<I", 7), struct.pack("<?", value)
    if isinstance(value, int):
        return struct.pack("<I", 4 if value >= 0 else 5), struct.pack("<q", value)[:4]
    if isinstance(value, float):
        return struct.pack("<I", 6), struct.pack("<f", value)
    if isinstance(value, str):
        return struct.pack("<I", 8), string(value)
    kind = 8 if isinstance(value, list) else ITEM_TYPES[value.dtype.str]
    items = b"".join(map(string, value)) if isinstance(value, list) else value.tobytes()
    return struct.pack("<I", 9), struct.pack("<IQ", kind, len(value)) + items


def load_all(path: Path) -> dict[str, np.ndarray]:
    """All that a checkpoint is read for, as `MultiUserLLM.from_pretrained` does."""
    config = read_model_config(path)
    load_tokenizer(path)
    read_generation_defaults(path)
    loaded: dict[str, np.ndarray] = {}
    parameters = {
        name: (shape, np.dtype(np.float32)) for name, shape in parameter_shapes(config).items()
    }
    load_checkpoint(path, config, parameters, loaded.__setitem__)
    return loaded
