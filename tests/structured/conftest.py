"""The tokenizers of every family, and that of the small ChatGLM3."""

import json

import pytest

from glm_multiuser.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from tests.server.process import ROOT
from tests.structured.walking import Allows, compiler_of
from tests.tokenizers.conftest import (  # noqa: F401
    chatglm3_folder,
    family_folders,
    glm4_folder,
    qwen2_folder,
    small_tokenizer,
    train_file,
    trained_file,
)


@pytest.fixture(scope="session")
def chatglm3_tiny() -> ChatTokenizer:
    found = load_tokenizer(ROOT / "ckpt/chatglm3-tiny")
    assert found is not None
    return found


@pytest.fixture(scope="session")
def allows(chatglm3_tiny: ChatTokenizer) -> Allows:
    """Whether an answer of a schema may be this text."""
    compiler = compiler_of(chatglm3_tiny)

    def allowed(schema: object, text: str) -> bool:
        matcher = compiler.compile(Grammar.json_schema(json.dumps(schema)))
        for token_id in chatglm3_tiny.encode_inside(chatglm3_tiny.content_header() + text):
            if matcher.complete or not matcher.allowed()[token_id]:
                return False
            matcher.accept(token_id)
        return matcher.complete or bool(matcher.allowed()[list(chatglm3_tiny.stop_token_ids)].any())

    return allowed
