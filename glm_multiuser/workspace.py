"""What steps need beside weights and caches, estimated from the shapes of their largest tensors.

On a CPU with native kernels the sum was held against measured memory (`benchmarks/plan_memory.py`).
For MindSpore's own operators it is what must be there at the same time if memory is used again as
soon as it is free. On an Ascend card nobody has measured it; on a CPU MindSpore takes far more, as
if it kept what every operator of every graph puts out.
"""

from __future__ import annotations

from glm_multiuser import device
from glm_multiuser.config import AnyModelConfig, EngineConfig

FLOAT32 = 4


def largest_step(config: AnyModelConfig, engine: EngineConfig, native: bool, number: int) -> int:
    """Bytes that the largest step needs.

    Args:
        config: of the model.
        engine: how many users, and how long they are.
        native: whether native kernels compute it.
        number: bytes of a number that is computed with.
    """
    if native:
        rows = engine.users + prompt_tokens(config, engine, native)
        held = 0 if config.is_causal else engine.seq_length * config.hidden_size
        layer = rows * widest(config)
        return FLOAT32 * (layer + held + engine.users * config.vocab_size)
    logits = engine.users * config.vocab_size * (number + FLOAT32)
    return logits + max(prompt_step(config, engine, number), decode_step(config, engine, number))


def prompt_tokens(config: AnyModelConfig, engine: EngineConfig, native: bool) -> int:
    """Tokens of prompts that one step takes in at most; a prompt of ChatGLM-6B enters whole."""
    if not config.is_causal:
        return engine.seq_length
    default = device.PREFILL_CHUNK[engine.device_target]
    chunk = engine.prefill_chunk or (device.PREFILL_CHUNK_NATIVE if native else default)
    return min(chunk, engine.seq_length)


def widest(config: AnyModelConfig) -> int:
    """Numbers per row in the middle of an MLP: what is added again, its input, and inside."""
    inner = 3 if config.is_causal else 1
    return 2 * config.hidden_size + inner * config.inner_hidden_size


def prompt_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Scores of all heads three times in float32 (mask, sum, softmax) and once to weigh values."""
    rows = prompt_tokens(config, engine, native=False)
    scores = config.num_attention_heads * rows * engine.seq_length * (3 * FLOAT32 + number)
    return scores + rows * widest(config) * number


def decode_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Scores of one token of every user, and the copy that a graph for a quarter of them reads."""
    positions = engine.users * engine.seq_length
    scores = config.num_attention_heads * positions * (3 * FLOAT32 + number)
    one_layer = 2 * config.num_key_value_heads * config.head_dim * positions * number
    return max(scores, scores // 4 + one_layer // 4) + engine.users * widest(config) * number
