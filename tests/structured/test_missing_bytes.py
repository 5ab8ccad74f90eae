"""Vocabularies without a token for some bytes, as that of SmolLM2: text never has most of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_multiuser import Grammar, InvalidParameterError
from glm_multiuser.structured.compiler import GrammarCompiler
from glm_multiuser.tokenizers import load_tokenizer

SMOLLM2 = Path(__file__).resolve().parents[2] / "ckpt/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.skipif(not SMOLLM2.exists(), reason="make smollm2 fetches it")
def test_only_what_needs_a_missing_byte_is_refused() -> None:
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, sorted(tokenizer.stop_token_ids))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    compiler.compile(Grammar.json_schema(schema))
    with pytest.raises(InvalidParameterError, match=r"no token for b'.{1,2}x04'"):
        compiler.compile(Grammar.choice(["a\x04b"]))
