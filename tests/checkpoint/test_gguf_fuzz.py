"""Broken GGUF files: each is one CheckpointError, at once and without a lot of memory."""

from __future__ import annotations

import contextlib
import re
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_multiuser.errors import CheckpointError
from tests.checkpoint.gguf_content import gguf_model, load_all, string

MODELS = ("llama_bpe.Q4_K_M", "llama_spm.F16", "qwen3.Q8_0", "chatglm.Q3_K_M", "glm4.Q8_0")
SECONDS, BYTES = 10.0, 100_000_000
"""The former is generous: a broken count would take hours."""

Break = Callable[[bytearray, Random], object]


def behind(data: bytearray, text: str) -> int:
    """Where what follows a key or a tensor's name begins."""
    return data.index(string(text)) + len(string(text))


def put(data: bytearray, at: int, code: str, value: int) -> None:
    struct.pack_into("<" + code, data, at, value)


def a_tensor(data: bytearray, random: Random) -> int:
    """Behind the name of a matrix: its number of dimensions, two sizes, type and offset."""
    names = ("token_embd", "blk.0.attn_output", "blk.0.ffn_down", "blk.0.ffn_up")
    return behind(data, random.choice(names) + ".weight")


def huge(random: Random) -> int:
    return random.randrange(1 << 40, 1 << 63)


def architecture(data: bytearray) -> str:
    at = behind(data, "general.architecture") + 4
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length].decode()


def values_of(data: bytearray, name: str) -> int:
    """Where the numbers of a vector begin; the data begin behind the last entry."""
    (offset,) = struct.unpack_from("<Q", data, behind(data, name) + 16)
    last = max(match.end() for match in re.finditer(rb"\.(weight|bias)", data))
    dimensions = data[last]
    return offset + -(-(last + 4 + 8 * dimensions + 12) // 32) * 32


def a_size(data: bytearray, random: Random) -> int:
    names = ("block_count", "embedding_length", "attention.head_count", "feed_forward_length")
    return behind(data, f"{architecture(data)}.{random.choice(names)}")


def cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(1, len(data) - 64) :]


def overlap(data: bytearray, random: Random) -> None:
    at = behind(data, "blk.0.ffn_down.weight") + 24
    data[at : at + 8] = data[behind(data, "blk.0.attn_output.weight") + 24 :][:8]


def swap_key(data: bytearray, random: Random) -> None:
    key = string(f"{architecture(data)}.{random.choice(['block_count', 'embedding_length'])}")
    data[:] = data.replace(key, key[:-1] + b"?")


BREAKS: dict[str, Break] = {
    "cut short": cut,
    "magic": lambda data, random: put(data, random.randrange(4), "B", random.randrange(128, 256)),
    "version": lambda data, random: put(data, 4, "I", random.randrange(4, 1 << 32)),
    "count of tensors": lambda data, random: put(data, 8, "Q", huge(random)),
    "count of metadata": lambda data, random: put(data, 16, "Q", huge(random)),
    "length of the first key": lambda data, random: put(data, 24, "Q", huge(random)),
    "count of tokens": lambda data, random: put(
        data, behind(data, "tokenizer.ggml.tokens") + 8, "Q", huge(random)
    ),
    "count of token types": lambda data, random: put(
        data, behind(data, "tokenizer.ggml.token_type") + 8, "Q", huge(random)
    ),
    "type of a value": lambda data, random: put(
        data, a_size(data, random), "I", random.randrange(13, 1 << 32)
    ),
    "a size": lambda data, random: put(
        data, a_size(data, random) + 4, "I", random.randrange(1000, 1 << 32)
    ),
    "dimensions": lambda data, random: put(
        data, a_tensor(data, random), "I", random.randrange(5, 1 << 32)
    ),
    "shape": lambda data, random: put(
        data, a_tensor(data, random) + 4 + 8 * random.randrange(2), "Q", huge(random)
    ),
    "type of a tensor": lambda data, random: put(
        data, a_tensor(data, random) + 20, "I", random.randrange(41, 1 << 32)
    ),
    "offset": lambda data, random: put(data, a_tensor(data, random) + 24, "Q", huge(random)),
    "overlapping tensors": overlap,
    "a key that is not UTF-8": lambda data, random: put(data, 32, "B", random.randrange(128, 256)),
    "a missing key": swap_key,
    "a token too few": lambda data, random: (
        put(data, behind(data, f"{architecture(data)}.vocab_size") + 4, "I", random.randrange(300))
        if f"{architecture(data)}.vocab_size".encode() in data
        else put(data, behind(data, "tokenizer.ggml.eos_token_id") + 4, "I", 1 << 20)
    ),
    "end of text": lambda data, random: put(
        data, behind(data, "tokenizer.ggml.eos_token_id") + 4, "I", random.randrange(384, 1 << 32)
    ),
    "values that are not finite": lambda data, random: put(
        data, values_of(data, "output_norm.weight") + 4 * random.randrange(8), "I", 0x7FFFFFFF
    ),
}


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Neither hours nor all memory."""
    start = time.monotonic()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize("seed", range(2 * len(BREAKS)))
def test_broken_files(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    data = bytearray(gguf_model(random.choice(MODELS)).read_bytes())
    list(BREAKS.values())[seed % len(BREAKS)](data, random)
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with bounded(), pytest.raises(CheckpointError):
        load_all(path)


@settings(
    derandomize=True,
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(MODELS),
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)),
        min_size=1,
        max_size=6,
    ),
)
def test_a_header_of_other_bytes(
    tmp_path: Path, name: str, changes: list[tuple[float, bytes]]
) -> None:
    """It is refused, or it is another model."""
    data = bytearray(gguf_model(name).read_bytes())
    header = data.index(b"output_norm.weight")
    for place, content in changes:
        at = int(place * header)
        data[at : at + len(content)] = content
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with bounded(), contextlib.suppress(CheckpointError):
        assert load_all(path)
