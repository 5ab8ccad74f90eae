"""Statistics of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from glm_multiuser.sessions.store import SessionCounts


@dataclass(frozen=True)
class EngineStats:
    """Configuration and counters of an engine; see `MultiUserLLM.stats`."""

    users: int
    active_users: int
    idle_users: int
    waiting: int
    prompt_tokens: int
    tokens_generated: int
    steps: int
    mean_batch: float
    """Rows per decode step."""
    compiles: int
    compiles_after_ready: int
    compile_seconds: float
    start_seconds: float
    graph_seconds: float
    overhead_seconds: float
    """Time of steps outside graphs."""
    cache_bytes_per_user: int
    """KV cache of a user with `seq_length` tokens."""
    cache_reserved_bytes: int
    """KV caches of all slots when they are full."""
    cache_resident_bytes: int
    """Physical memory of the KV caches now."""
    kernels: str
    """"native" or "portable"."""
    kernel_level: str
    """Instruction set of native kernels; "" for others."""
    weight_dtype: str
    """Type of the weight matrices."""
    cache_dtype: str
    """Type of the KV caches."""
    prefill_chunk: int
    """Prompt tokens per step while no user decodes."""
    prefill_chunk_beside: int
    """Current number of prompt tokens per step while others decode."""
    batch_invariant: bool
    """Whether the check at start-up found a row's logits bit for bit the same in every batch."""
    sessions: SessionCounts
    """Sessions of evicted users, and sessions on disk."""
