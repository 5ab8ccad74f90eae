"""The tokenizers of every family, and that of the small ChatGLM3."""

import pytest

from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from tests.server.process import ROOT
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
