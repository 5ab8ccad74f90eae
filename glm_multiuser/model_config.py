"""Model configurations, as in `config.json` of checkpoints.

The engine uses only the attributes that both classes have: sizes, `num_key_value_heads`,
`eos_token_ids`, `family` and `is_causal`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.errors import ConfigError

MOST_LAYERS = 1 << 10
LARGEST_SIZE = 1 << 24
"""Beyond every published model, and small enough for fast arithmetic."""


@dataclass(frozen=True)
class ChatGLM6BConfig:
    """The shape of a ChatGLM-6B model; field names follow its `config.json`.

    Raises:
        ConfigError: a size that is not positive or not divisible as required.
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
    """Depth in the DeepNorm factor sqrt(2 * depth); None: `num_layers`."""

    family = "chatglm_6b"
    tied = False
    is_causal = False
    """Whether attention is causal; in ChatGLM-6B it is bidirectional within the prompt."""

    def __post_init__(self) -> None:
        _check_shape(self)
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
        if self.deepnorm_layers is not None:
            check_size("deepnorm_layers", self.deepnorm_layers)
        for name in _TOKEN_IDS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name} is {reprlib.repr(value)}; it must be a token id")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Heads in the KV cache: all of them."""
        return self.num_attention_heads

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return (self.eos_token_id,)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ChatGLM6BConfig:
        """Picks the fields of this class from a parsed `config.json`.

        Raises:
            ConfigError: another architecture, or a missing size.
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
            config = cls(**known)
        except TypeError as error:
            raise ConfigError(f"config.json lacks a size of the model: {error}") from None
        for name in _TOKEN_IDS:
            if name in known and known[name] >= config.vocab_size:
                raise ConfigError(
                    f"{name} is {known[name]}; it must be below vocab_size {config.vocab_size}"
                )
        return config

    @classmethod
    def from_folder(cls, folder: Path) -> ChatGLM6BConfig:
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


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "mask_token_id", "gmask_token_id", "pad_token_id")

NORMS = ("rms", "layer")
NORM_POSITIONS = ("before", "after", "both")


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond a model's original context length.

    Attributes:
        kind: "linear", "llama3" or "yarn", as `rope_type` in `config.json`, or "factors".
        factor: by which the context length is extended.
        original_positions: the original context length; for "llama3" and "yarn".
        low_freq_factor, high_freq_factor: for "llama3".
        beta_fast, beta_slow: for "yarn".
        attention_factor: multiplier of cosines and sines; for "yarn".
        factors: for "factors", as in GGUF files: the divisor of each frequency.
    """

    kind: str
    factor: float
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class CausalConfig:
    """The configuration of a causal model; `models/decoder.py` implements all of them.

    Attributes:
        family: as in `checkpoint/families.py`.
        vocab_size: rows of the embedding, including padding.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads (grouped-query attention).
        inner_hidden_size: of the MLP; its gated input layer has twice as many outputs.
        max_sequence_length: maximum context length.
        eos_token_ids: ids that end an answer.
        rotary_dim: rotated dimensions of each head; the others are unchanged.
        rope_theta: base of the rotary frequencies, including `rope_ratio`.
        rope_scaling: of the rotary frequencies; None: unscaled.
        rotary_interleaved: whether neighbours are rotated together, as in ChatGLM, or the first
            half of `rotary_dim` with the second, as in Llama.
        norm: "rms" or "layer".
        norm_position: of norms: "before" attention and MLP, "after" them (before the residual
            sums), or "both".
        query_key_norm: whether each query and key head is normalised before rotation.
        qkv_bias: whether queries, keys and values have a bias.
        dense_bias: whether the attention output has a bias.
        mlp_bias: whether the MLP has biases.
        tied: whether the output layer shares the embedding's weights.

    Raises:
        ConfigError: a size that is not positive or not divisible as required.
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
    rope_scaling: Optional[RopeScaling] = None
    rotary_interleaved: bool = False
    norm: str = "rms"
    norm_position: str = "before"
    layernorm_epsilon: float = 1e-5
    query_key_norm: bool = False
    qkv_bias: bool = True
    dense_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False

    is_causal = True

    def __post_init__(self) -> None:
        _check_shape(self)
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
        for name, choices in (("norm", NORMS), ("norm_position", NORM_POSITIONS)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


AnyModelConfig = Union[ChatGLM6BConfig, CausalConfig]

ModelConfig = ChatGLM6BConfig
"""Former name, from when there was only one family."""


def _check_shape(config: AnyModelConfig) -> None:
    for one in fields(config):
        if one.type == "int" and "token_id" not in one.name:
            check_size(one.name, getattr(config, one.name))
    value = config.layernorm_epsilon
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1:
        raise ConfigError(
            f"layernorm_epsilon is {reprlib.repr(value)}; it must be a number above 0 and below 1"
        )


def check_size(name: str, value: object) -> None:
    """Raises ConfigError for an implausible size."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{name} is {reprlib.repr(value)}; it must be a whole number of at least 1"
        )
    most = MOST_LAYERS if name.endswith("layers") else LARGEST_SIZE
    if value > most:
        raise ConfigError(f"{name} is {reprlib.repr(value)}; it must be at most {most}")
