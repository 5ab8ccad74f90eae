"""The tokenizers of every family, and that of the small ChatGLM3."""

import json

import pytest

from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from tests.server.process import ROOT
from tests.structured.walking import Allows, compiler_of, may_be
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
        return may_be(compiler, chatglm3_tiny, Grammar.json_schema(json.dumps(schema)), text)

    return allowed
