"""What an engine is and has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from glm_multiuser.sessions.store import SessionCounts


@dataclass(frozen=True)
class EngineStats:
    """What an engine is and has done; see `MultiUserLLM.stats`."""

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
    """Time in steps that was not spent in graphs."""
    cache_bytes_per_user: int
    """Of a user who holds `seq_length` tokens."""
    cache_reserved_bytes: int
    """What the caches of all slots take when they are full."""
    cache_resident_bytes: int
    """Physical memory that they take now."""
    kernels: str
    """"native" or "portable"."""
    kernel_level: str
    """Of native kernels, the processor's instructions that they use; "" for others."""
    weight_dtype: str
    """Type of the matrices."""
    cache_dtype: str
    """Type of keys and values."""
    prefill_chunk: int
    """Prompt tokens per step while no user decodes."""
    prefill_chunk_beside: int
    """Tokens of prompts in one step where others decode, as it is now."""
    batch_invariant: bool
    """Whether a row's logits were bit for bit the same in every compiled batch at start-up."""
    sessions: SessionCounts
    """Of users whose slot was taken, or who are kept on disk."""
