"""Long texts are encoded without the GIL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.tokenizers import library
from glm_multiuser.tokenizers.tokenizer_json import vocabulary_of
from tests.tokenizers.conftest import golden_json

KINDS = ["llama_bpe", "llama_spm", "qwen2"]
WORDS = "The cat's 12 hats,  你好 naïve\n\n🙂 "


def content_of(kind: str, *, ignore_merges: bool = False) -> Any:
    content = golden_json(kind)["tokenizer"]
    content["model"]["ignore_merges"] = ignore_merges
    return content


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_a_short_text(
    kind: str, ignore_merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = vocabulary_of(content_of(kind, ignore_merges=ignore_merges), Path("a")).encode
    text = WORDS * 300
    assert len(text) > library.LONG_TEXT
    ids = encode(text)
    monkeypatch.setattr(library, "LONG_TEXT", len(text) + 1)
    assert encode(text) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_run(kind: str) -> None:
    encode = vocabulary_of(content_of(kind), Path("a")).encode
    with ThreadPoolExecutor(1) as encoding, ThreadPoolExecutor(1) as other:
        running = encoding.submit(encode, WORDS * 10_000)
        turns = 0
        while not running.done():
            other.submit(int).result()
            turns += 1
        assert running.result()
    # While a call holds the GIL there is none, and few before and after it.
    assert turns > 500


def test_bytes_without_a_piece_are_left_out_of_whole_words() -> None:
    content = content_of("llama_bpe", ignore_merges=True)
    vocab = content["model"]["vocab"]
    vocab["zq"] = len(vocab) + 1000
    del vocab["q"]
    content["model"]["merges"] = []
    encode = vocabulary_of(content, Path("a")).encode
    assert encode("zq") == [vocab["zq"]]
    assert encode("qzq") == [vocab["z"]]
