"""The tokenizers that the tests run on: the real one, the reference's small one, a trained one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from glm_multiuser.tokenizers import ChatGLMTokenizer
from tests.golden_data import golden_folder

CONTROL = ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"]
WHITESPACE = ["<n>", "<|tab|>", *(f"<|blank_{length}|>" for length in range(2, 81))]
CORPUS = ["你好,世界! It's fine, isn't it? the quick brown fox. 你是谁"] * 3

TrainFile = Callable[..., Path]


@pytest.fixture(scope="session")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> TrainFile:
    """Trains a vocabulary file of a few hundred pieces; options go to the trainer."""

    def train(**options: Any) -> Path:
        content = io.BytesIO()
        settings: dict[str, Any] = {
            "vocab_size": 400,
            "hard_vocab_limit": False,
            "byte_fallback": True,
            "pad_id": 3,
            "control_symbols": CONTROL,
            "user_defined_symbols": WHITESPACE,
            "minloglevel": 2,
            **options,
        }
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=content, **settings
        )
        file = tmp_path_factory.mktemp("vocabulary") / "ice_text.model"
        file.write_bytes(content.getvalue())
        return file

    return train


@pytest.fixture(scope="session")
def trained_file(train_file: TrainFile) -> Path:
    return train_file()


@pytest.fixture(scope="session")
def real_folder() -> Path:
    return golden_folder("tokenizer_chatglm_6b", "golden.json", "ice_text.model")


@pytest.fixture(scope="session")
def real(real_folder: Path) -> ChatGLMTokenizer:
    return ChatGLMTokenizer.from_folder(real_folder)


@pytest.fixture(scope="session")
def golden(real_folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((real_folder / "golden.json").read_text("utf-8"))
    return values


@pytest.fixture(scope="session", params=["trained", "end_to_end", "real"])
def file(request: pytest.FixtureRequest) -> Path:
    """One vocabulary file after the other."""
    if request.param == "trained":
        found: Path = request.getfixturevalue("trained_file")
        return found
    name = {"end_to_end": "e2e_chatglm_6b", "real": "tokenizer_chatglm_6b"}[request.param]
    return golden_folder(name, "ice_text.model") / "ice_text.model"


@pytest.fixture(scope="session")
def tokenizer(file: Path) -> ChatGLMTokenizer:
    return ChatGLMTokenizer(file)
