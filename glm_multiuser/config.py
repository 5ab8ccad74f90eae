"""What a model is (read from its checkpoint) and how an engine is set up (chosen by its user)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from glm_multiuser.errors import ConfigError

BLOCK_LENGTH = 256
"""Positions per cache block: a decode step reads whole blocks, and only those in use."""

SMALLEST_PROMPT = 16
"""Shorter prompts are padded to this."""


def prompt_lengths(seq_length: int) -> tuple[int, ...]:
    """The lengths that prompts are padded to: powers of two, and the longest that may come."""
    lengths = []
    length = SMALLEST_PROMPT
    while length < seq_length:
        lengths.append(length)
        length *= 2
    return (*lengths, seq_length)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a ChatGLM-6B model; field names follow its `config.json`.

    Raises:
        ConfigError: a size that is not positive, or that does not divide as it must.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    inner_hidden_size: int
    layernorm_epsilon: float = 1e-5
    max_sequence_length: int = 2048
    bos_token_id: int = 130004
    eos_token_id: int = 130005
    mask_token_id: int = 130000
    gmask_token_id: int = 130001
    pad_token_id: int = 3
    deepnorm_layers: Optional[int] = None
    """Depth that the DeepNorm factor sqrt(2 * depth) is computed from; None: `num_layers`."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_attention_heads",
            "inner_hidden_size",
            "max_sequence_length",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} cannot be split over "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 4:
            raise ConfigError(
                f"hidden_size / num_attention_heads is {self.head_dim}; the two-dimensional "
                "rotary embedding needs a multiple of 4"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Picks the fields of this class from a parsed `config.json`.

        Raises:
            ConfigError: another architecture, or a size that is missing.
        """
        model_type = values.get("model_type", "chatglm")
        if model_type != "chatglm" or not values.get("position_encoding_2d", False):
            raise ConfigError(
                f"model_type {model_type!r} with position_encoding_2d "
                f"{values.get('position_encoding_2d')!r} is not ChatGLM-6B; "
                "this version reads model_type 'chatglm' with position_encoding_2d true"
            )
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        try:
            return cls(**known)
        except TypeError as error:
            raise ConfigError(f"config.json lacks a size of the model: {error}") from None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads `config.json` of a checkpoint folder.

        Raises:
            ConfigError: no such file, not JSON, or not a ChatGLM-6B configuration.
        """
        path = Path(folder) / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            hint = ""
            if any(path.parent.glob("*.ckpt")) or any(path.parent.glob("*.yaml")):
                hint = "; a yaml of MindFormers cannot stand in for Hugging Face's config.json"
            raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds {type(values).__name__}, not a JSON object")
        return cls.from_dict(values)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is set up.

    Attributes:
        users: slots: how many users decode side by side.
        seq_length: tokens that each user can hold, prompt and answer together.
        max_queue: requests that may wait; one more raises `QueueFullError`.
        max_queue_per_user: requests of one user that may wait; one more raises `UserBusyError`.
        users_per_cell: rows of one `KVPast` cell, 1 to `users`. None: one cell for all, which
            was measured to be fastest.
        batch_invariant: a user's logits do not depend, to the last bit, on how many others decode
            in the same step. It pads every decode step to a whole number of the matrix kernel's
            tiles, which a user who is alone on the engine pays for.
        dtype: "float32", "float16", or None for the device's own choice.
        device_target: "CPU" or "Ascend".
        device_id: which card.

    Raises:
        ConfigError: a field out of its range.
    """

    users: int = 8
    seq_length: int = 512
    max_queue: int = 64
    max_queue_per_user: int = 16
    users_per_cell: Optional[int] = None
    batch_invariant: bool = True
    dtype: Optional[str] = None
    device_target: str = "CPU"
    device_id: int = 0

    def __post_init__(self) -> None:
        limits = {
            "users": (1, 1024),
            "seq_length": (8, 1 << 20),
            "max_queue": (0, 1 << 20),
            "max_queue_per_user": (1, 1 << 20),
            "device_id": (0, 1 << 10),
        }
        if self.users_per_cell is not None:
            limits["users_per_cell"] = (1, self.users)
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; it must be between {low} and {high}")
        if self.dtype not in (None, "float32", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be 'float32' or 'float16'")
        if self.device_target not in ("CPU", "Ascend"):
            raise ConfigError(
                f"device_target is {self.device_target!r}; it must be 'CPU' or 'Ascend'"
            )

    def check_fits(self, model: ModelConfig) -> None:
        """Raises ConfigError if users of this engine could hold more than the model can."""
        if self.seq_length > model.max_sequence_length:
            raise ConfigError(
                f"seq_length is {self.seq_length}; this model's max_sequence_length is "
                f"{model.max_sequence_length}"
            )
