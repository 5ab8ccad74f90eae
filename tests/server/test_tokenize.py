"""`/tokenize` and `/detokenize` agree with the tokens used for answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.server.service import LONG_PROMPT
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.tokenizers import load_tokenizer
from tests.server.asking import KEYS, RED, post
from tests.server.echoing import BYTES, END, MESSAGE, NEXT, SEQ_LENGTH, VOCAB, echo_llm
from tests.server.in_process import (
    FOLDER,
    MODEL,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
)

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "你是谁"},
    {"role": "assistant", "content": "我"},
    {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "?"}]},
]


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    """A model whose tokens are bytes."""
    with in_process_server(mock_settings(names=(MODEL, "other")), echo_llm) as server:
        yield server


def answer_of(server: InProcessServer, path: str, body: Any) -> Any:
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", ["", "a", "你是谁 😀", "x" * (LONG_PROMPT + 1)])
def test_a_text_and_back(echo: InProcessServer, text: str) -> None:
    tokens = list(text.encode())
    assert answer_of(echo, "/tokenize", {"model": "other", "prompt": text}) == {
        "count": len(tokens),
        "max_model_len": SEQ_LENGTH,
        "tokens": tokens,
    }
    assert answer_of(echo, "/detokenize", {"tokens": tokens}) == {"prompt": text}


def test_a_conversation_has_the_tokens_that_are_answered(echo: InProcessServer) -> None:
    for body in ({"messages": CONVERSATION}, {"messages": CONVERSATION, "tools": [TOOL]}):
        count = answer_of(echo, "/tokenize", body)["count"]
        answered = answer_of(echo, "/v1/chat/completions", body)
        assert count == answered["usage"]["prompt_tokens"]
    tokens = answer_of(echo, "/tokenize", {"messages": CONVERSATION})["tokens"]
    texts = ("Be brief.", "你是谁", "我", "Who ?")
    assert tokens == [one for text in texts for one in (MESSAGE, *text.encode())]


def test_special_tokens_are_written_as_their_names() -> None:
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer is not None

    def open_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        llm = echo_llm(settings)
        llm.tokenizer = tokenizer
        llm._vocab_size = read_model_config(FOLDER).vocab_size
        return llm

    with in_process_server(mock_settings(warm_up=()), open_llm) as server:
        asked = [{"role": "user", "content": "你是谁"}]
        tokens = answer_of(server, "/tokenize", {"messages": asked})["tokens"]
        assert tokens == tokenizer.encode_messages(asked)
        assert answer_of(server, "/detokenize", {"tokens": tokens}) == {
            "prompt": "你是谁[gMASK]<sop>"
        }


NEUTRAL: dict[str, Any] = {
    "add_special_tokens": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "return_token_strs": False,
    "chat_template": None,
    "chat_template_kwargs": {},
}


def test_what_changes_nothing_is_accepted(echo: InProcessServer) -> None:
    assert answer_of(echo, "/tokenize", {"prompt": "ab", **NEUTRAL})["tokens"] == list(b"ab")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CONVERSATION}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "prompt"),
        ("/tokenize", {"tools": [TOOL]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "what": 1}, "what: unknown field"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CONVERSATION, "chat_template": "{}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [1, VOCAB]}, f"tokens has {VOCAB}; .* below {VOCAB}"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "unknown field"),
    ],
)
def test_what_is_wrong_is_named(echo: InProcessServer, path: str, body: Any, field: str) -> None:
    content = post(echo, path, body)
    assert content.status_code == 400
    error = content.json()
    assert error["code"] == "invalid_value"
    assert re.search(field, error["error"]), error


def test_no_token_of_the_vocabulary_fails(echo: InProcessServer) -> None:
    every = list(range(VOCAB))
    text = answer_of(echo, "/detokenize", {"tokens": every})["prompt"]
    assert text.startswith(bytes(range(128)).decode())
    assert {END, MESSAGE, NEXT} == set(every[BYTES:])
    assert answer_of(echo, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_without_a_tokenizer_there_is_no_text() -> None:
    def open_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        llm = mock_llm(settings)
        llm.tokenizer = None
        return llm

    bodies = (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": CONVERSATION}),
        ("/detokenize", {"tokens": [1]}),
    )
    with in_process_server(open_llm=open_llm) as server:
        for path, body in bodies:
            refused = post(server, path, body)
            assert refused.status_code == 400
            assert "tokenizer" in refused.json()["error"]


def test_a_key_and_a_known_model_are_needed() -> None:
    with in_process_server(mock_settings(keys=KEYS)) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert post(server, path, body).status_code == 401
            assert post(server, path, body, **RED).status_code == 200
            assert post(server, path, {**body, "model": "gpt-9"}, **RED).status_code == 404
