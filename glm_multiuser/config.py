"""Settings of an engine; for the shape of its model see `model_config.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from glm_multiuser.errors import ConfigError, shown
from glm_multiuser.model_config import AnyModelConfig, CausalConfig, ModelConfig
from glm_multiuser.settings import check, setting
from glm_multiuser.sizes import bytes_of

MOST_USERS = 1024
"""Maximum number of users per engine."""


def folder_of(setting: str, folder: str) -> Path:
    """Returns the path of a folder setting; expands `~` and `~user`.

    Raises:
        ConfigError: not a valid path.
    """
    try:
        path = Path(folder).expanduser()
    except TypeError:
        raise ConfigError(f"{setting} is {shown(folder)}; it must be a path") from None
    except RuntimeError:
        raise ConfigError(f"{setting} is {folder!r}; there is no such user") from None
    if "\0" in str(path):
        raise ConfigError(f"{setting} is {folder!r}; a name must not have the character NUL")
    return path


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; all interfaces derive their options from it.

    Raises:
        ConfigError: a field is out of its range.
    """

    users: int = setting(8, "Slots: users that decode concurrently", low=1, high=MOST_USERS)
    seq_length: int = setting(
        512, "Maximum tokens per user, prompt and answer together", low=8, high=1 << 20
    )
    device_target: str = setting("CPU", "Device type", choices=("CPU", "Ascend"))
    device_id: int = setting(0, "Device number", low=0, high=1 << 10)
    dtype: Optional[str] = setting(
        None,
        "Arithmetic precision; default: float32 on CPU, float16 on Ascend",
        choices=("float32", "float16"),
    )
    max_queue: int = setting(
        64, "Maximum requests waiting for a slot; others are rejected", low=0, high=1 << 20
    )
    max_queue_per_user: int = setting(
        16, "Maximum waiting requests per user; others are rejected", low=1, high=1 << 20
    )
    users_per_cell: Optional[int] = setting(
        None,
        "Users per KV cache cell; default: all in one, the fastest",
        low=1,
        high="users",
    )
    batch_invariant: bool = setting(
        True,
        "Batch invariance: bitwise identical logits in every batch; portable kernels pad decode "
        "steps for it",
    )
    prefill_chunk: Optional[int] = setting(
        None,
        "Chunked prefill: prompt tokens per step, batched with other users' decoding; default: "
        "depends on the device",
        low=1,
        high=1 << 20,
    )
    cache_prompt: bool = setting(
        True,
        "Per-user prefix cache (causal models): skip the part of a prompt that is still in the "
        "user's slot",
    )
    kernels: str = setting(
        "auto",
        "native (CPU, float32 arithmetic), portable (MindSpore's operators) or auto: native where "
        "possible",
        choices=("auto", "native", "portable"),
    )
    weight_dtype: Optional[str] = setting(
        None,
        "Type of weight matrices, with native kernels; default: as in the checkpoint",
        choices=("float32", "bfloat16", "float16", "int8", "int4"),
    )
    compute_dtype: str = setting(
        "float32",
        "Type that matmul inputs are rounded to, with native kernels; at least bfloat16 for int8 "
        "weights; int8 only for int8 weights and weights in groups",
        choices=("float32", "bfloat16", "int8"),
    )
    cache_dtype: Optional[str] = setting(
        None,
        "KV cache type, with native kernels; default: bfloat16 if matmul inputs are rounded, "
        "otherwise float32",
        choices=("float32", "bfloat16", "int8"),
    )

    cache_memory: Optional[str] = setting(
        None,
        "KV cache memory budget, e.g. 8GiB, with native kernels: a request waits until its maximum "
        "need is available; default: none, every user can fill its cache",
    )
    preallocate_caches: bool = setting(
        False,
        "Allocate the memory of all KV caches at the start, in huge pages, with native kernels: "
        "faster; default: memory follows tokens",
    )
    weight_cache: Optional[str] = setting(
        None,
        "Folder that caches packed weights between starts, with native kernels, or off; default: "
        "$GLM_MULTIUSER_WEIGHT_CACHE, or glm_multiuser in the user's cache folder",
    )
    compile_cache_dir: Optional[str] = setting(
        None,
        "Folder that caches compiled graphs between starts, with portable kernels; default: none",
    )
    session_memory: Optional[str] = setting(
        None,
        "Memory for sessions evicted from their slot, e.g. 2GiB; default: none",
    )
    session_dir: Optional[str] = setting(
        None,
        "Folder that keeps sessions across restarts and servers; default: none",
    )
    session_disk: str = setting(
        "16GiB", "Size limit of session files; the least recently used are removed"
    )
    session_ttl: float = setting(
        7 * 24 * 3600.0, "Seconds after its last use until a session expires", above=0
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("cache_memory", "session_memory", "session_disk"):
            if getattr(self, name) is not None:
                bytes_of(name, getattr(self, name))
        for name in ("weight_cache", "compile_cache_dir", "session_dir"):
            if getattr(self, name) is not None:
                folder_of(name, getattr(self, name))
        if self.compute_dtype == "int8" and self.weight_dtype not in (None, "int8", "int4"):
            raise ConfigError(
                f"compute_dtype is 'int8'; weight_dtype must be 'int8' or 'int4', or None for a "
                f"checkpoint in groups, not {self.weight_dtype!r}"
            )

    @property
    def cache_limit(self) -> Optional[int]:
        """`cache_memory` in bytes."""
        return None if self.cache_memory is None else bytes_of("cache_memory", self.cache_memory)

    def check_fits(self, model: AnyModelConfig) -> None:
        """Raises ConfigError if `seq_length` exceeds the model's maximum, or `model` is not a model
        configuration."""
        if not isinstance(model, (CausalConfig, ModelConfig)):
            raise ConfigError(
                f"model_config is {shown(model)}; it must be a CausalConfig or a ModelConfig"
            )
        if self.seq_length > model.max_sequence_length:
            raise ConfigError(
                f"seq_length is {self.seq_length}; this model's max_sequence_length is "
                f"{model.max_sequence_length}"
            )


@dataclass(frozen=True)
class MixedEngineConfig(EngineConfig):
    """Settings of an engine whose matrices have different types.

    Attributes:
        weight_types: name of a matrix -> its type; the others have `weight_dtype`.
    """

    weight_types: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
