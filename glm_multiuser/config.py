"""What a model is (read from its checkpoint) and how an engine is set up (chosen by its user).

`ModelConfig` is a ChatGLM-6B, `CausalConfig` one of the causal families; what both have (sizes,
`num_key_value_heads`, `eos_token_ids`, `family`, `is_causal`) is all that the engine looks at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

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
        _check_sizes(
            self,
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_attention_heads",
            "inner_hidden_size",
            "max_sequence_length",
        )
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
    def family(self) -> str:
        """Which model computes it, as in `models/registry.py`."""
        return "chatglm-6b"

    @property
    def is_causal(self) -> bool:
        """Whether a token never depends on a later one; the context of ChatGLM-6B does."""
        return False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Heads that keys and values are kept for: all of them."""
        return self.num_attention_heads

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return (self.eos_token_id,)

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
class CausalConfig:
    """The shape of a causal model with grouped queries: ChatGLM2, ChatGLM3, GLM-4, Qwen2.

    Attributes:
        family: which model computes it, as in `models/registry.py`: "chatglm" or "qwen2".
        vocab_size: rows of the embedding, padding included.
        hidden_size: of a token between layers.
        num_layers: transformer layers.
        num_attention_heads: heads of queries.
        num_key_value_heads: groups that share one head of keys and values.
        head_dim: of each head.
        inner_hidden_size: of the MLP, which gates one half of twice that by the other.
        max_sequence_length: positions that the model was trained for.
        eos_token_ids: ids that end an answer.
        rotary_dim: numbers of each head that turn with the position; the others stay.
        rope_theta: base of the rotary frequencies, `rope_ratio` included.
        rotary_interleaved: whether neighbours turn with each other, as in ChatGLM, or the first
            half of `rotary_dim` with the second, as in Qwen2.
        layernorm_epsilon: of the RMS norms.
        qkv_bias: whether queries, keys and values have a bias.
        tied: whether the output layer is the embedding.

    Raises:
        ConfigError: a size that is not positive, or that does not divide as it must.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    inner_hidden_size: int
    max_sequence_length: int
    eos_token_ids: tuple[int, ...]
    rotary_dim: int
    rope_theta: float = 10000.0
    rotary_interleaved: bool = False
    layernorm_epsilon: float = 1e-5
    qkv_bias: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        _check_sizes(
            self,
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "inner_hidden_size",
            "max_sequence_length",
            "rotary_dim",
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} cannot be shared out over "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ConfigError(
                f"rotary_dim is {self.rotary_dim}; it must be even and at most head_dim, "
                f"{self.head_dim}"
            )

    @property
    def is_causal(self) -> bool:
        """Whether a token never depends on a later one."""
        return True


AnyModelConfig = Union[ModelConfig, CausalConfig]


def _check_sizes(config: AnyModelConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")


KERNELS = ("auto", "native", "portable")

WEIGHT_DTYPES = ("float32", "bfloat16", "int8")
"""Of native kernels."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is set up.

    Attributes:
        users: slots: how many users decode side by side.
        seq_length: tokens that each user can hold, prompt and answer together.
        max_queue: requests that may wait; one more raises `QueueFullError`.
        max_queue_per_user: requests of one user that may wait; one more raises `UserBusyError`.
        users_per_cell: users of one cell of keys and values, 1 to `users`. None: one cell for
            all, which was measured to be fastest.
        batch_invariant: a user's logits do not depend, to the last bit, on how many others decode
            in the same step. It pads every decode step to a whole number of the matrix kernel's
            tiles, which a user who is alone on the engine pays for.
        prefill_chunk: tokens of prompts that enter in a step beside everybody else's next token.
            None: what suits the device. A prompt of ChatGLM-6B enters whole; with native kernels
            a longer one goes through some layers in each step.
        cache_prompt: of a causal model: whether a prompt starts behind what its user's slot still
            holds of it.
        dtype: "float32", "float16", or None for the device's own choice.
        kernels: "native", the kernels of `glm_multiuser.kernels`, which are for the CPU;
            "portable", MindSpore's operators; or "auto", native where they can be used. They
            compute in float32.
        weight_dtype: of the matrices: "float32", "bfloat16" or "int8" with native kernels; None:
            `dtype`.
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
    prefill_chunk: Optional[int] = None
    cache_prompt: bool = True
    dtype: Optional[str] = None
    kernels: str = "auto"
    weight_dtype: Optional[str] = None
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
        if self.prefill_chunk is not None:
            limits["prefill_chunk"] = (1, 1 << 20)
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; it must be between {low} and {high}")
        if self.dtype not in (None, "float32", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be 'float32' or 'float16'")
        if self.kernels not in KERNELS:
            raise ConfigError(
                f"kernels is {self.kernels!r}; it must be one of {', '.join(KERNELS)}"
            )
        if self.weight_dtype not in (None, *WEIGHT_DTYPES):
            raise ConfigError(
                f"weight_dtype is {self.weight_dtype!r}; it must be one of "
                f"{', '.join(WEIGHT_DTYPES)}"
            )
        if self.device_target not in ("CPU", "Ascend"):
            raise ConfigError(
                f"device_target is {self.device_target!r}; it must be 'CPU' or 'Ascend'"
            )

    def check_fits(self, model: AnyModelConfig) -> None:
        """Raises ConfigError if users of this engine could hold more than the model can."""
        if self.seq_length > model.max_sequence_length:
            raise ConfigError(
                f"seq_length is {self.seq_length}; this model's max_sequence_length is "
                f"{model.max_sequence_length}"
            )
