"""The tokenizer of ChatGLM2 and ChatGLM3 against the originals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.tokenizers import ChatGLM2Tokenizer, load_tokenizer
from tests.golden_data import golden_folder
from tests.tokenizers.conftest import TrainFile, write_config

PYTHON_CALL = "```python\ntool_call("


@pytest.fixture(scope="module")
def folder() -> Path:
    return golden_folder("tokenizer_chatglm2_chatglm3", "golden.json", "tokenizer.model")


@pytest.fixture(scope="module")
def golden(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "golden.json").read_text("utf-8"))
    return values


@pytest.fixture(scope="module")
def second(folder: Path) -> ChatGLM2Tokenizer:
    return ChatGLM2Tokenizer.from_folder(folder, version=2)


@pytest.fixture(scope="module")
def third(folder: Path) -> ChatGLM2Tokenizer:
    return ChatGLM2Tokenizer.from_folder(folder)


def in_openai_form(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the original, with its one golden call."""
    if not message.get("metadata"):
        role = {"observation": "tool"}.get(message["role"], message["role"])
        return {"role": role, "content": message["content"]}
    assert message["content"] == f"{PYTHON_CALL}city='北京')\n```"
    function = {"name": message["metadata"], "arguments": '{"city": "北京"}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


class TestAgainstTheOriginal:
    def test_there_are_all_cases(self, golden: dict[str, Any]) -> None:
        assert len(golden["cases"]) == 226
        assert len(golden["chatglm2_build_prompt"]) == 12
        assert len(golden["chatglm3_build_chat_input"]) == 14
        assert len(golden["chatglm3_build_single_message"]) == 8

    def test_ids(
        self, second: ChatGLM2Tokenizer, third: ChatGLM2Tokenizer, golden: dict[str, Any]
    ) -> None:
        prefix = [third.special["[gMASK]"], third.special["sop"]]
        for one in golden["cases"]:
            assert third.encode(one["text"]) == second.encode(one["text"]) == one["sp_ids"]
            # The originals read no special token in a text either, unless they are asked to.
            assert [*prefix, *one["sp_ids"]] == one["chatglm3_input_ids"]
            assert one["chatglm2_input_ids"] == one["chatglm3_input_ids"]

    def test_decoded(self, third: ChatGLM2Tokenizer, golden: dict[str, Any]) -> None:
        with_prefixes = 0
        for one in golden["cases"]:
            ids = one["sp_ids"]
            assert third.decode(ids) == one["decoded"]
            if "prefix_decoded" in one:
                with_prefixes += 1
                prefixes = [third.decode(ids[: end + 1]) for end in range(len(ids))]
                assert prefixes == one["prefix_decoded"]
        assert with_prefixes > 150

    def test_prompts_of_chatglm2(self, second: ChatGLM2Tokenizer, golden: dict[str, Any]) -> None:
        for one in golden["chatglm2_build_prompt"]:
            assert second.encode_prompt(one["query"], one["history"]) == one["input_ids"]

    def test_prompts_of_chatglm3(self, third: ChatGLM2Tokenizer, golden: dict[str, Any]) -> None:
        tools_seen = 0
        for one in golden["chatglm3_build_chat_input"]:
            history = one["history"]
            tools = [function for message in history for function in message.get("tools", ())]
            tools_seen += len(tools)
            # The system message of the golden case with tools is what this library writes.
            conversation = [
                in_openai_form(message) for message in history if "tools" not in message
            ]
            conversation.append(in_openai_form({"role": one["role"], "content": one["query"]}))
            offered = [{"type": "function", "function": function} for function in tools]
            assert third.encode_messages(conversation, offered) == one["input_ids"]
            if not tools:
                assert third.encode_prompt(one["query"], conversation[:-1]) == one["input_ids"]
        assert tools_seen == 1

    def test_single_messages(self, third: ChatGLM2Tokenizer, golden: dict[str, Any]) -> None:
        for one in golden["chatglm3_build_single_message"]:
            role = {"observation": "tool"}.get(one["role"], one["role"])
            assert third.encode_message(role, one["metadata"], one["message"]) == one["ids"]

    def test_process_response(self, third: ChatGLM2Tokenizer, golden: dict[str, Any]) -> None:
        texts = 0
        for one in golden["chatglm3_process_response"]:
            expected = one["content"]
            if isinstance(expected, dict):
                expected = f"{expected['name']}\n{expected['content']}"
            else:
                texts += 1
            assert third.process_response(one["text"]) == expected
        assert texts == 3

    def test_numbers_of_the_released_file(
        self, second: ChatGLM2Tokenizer, third: ChatGLM2Tokenizer, golden: dict[str, Any]
    ) -> None:
        special = golden["special_ids"]
        assert third.vocab_size == golden["vocab_size"]
        assert third.special.items() <= special.items()
        assert second.special == {name: special[name] for name in second.special}
        assert second.vocab_size == special["<|system|>"]
        assert second.stop_token_ids == (special["<eos>"],)
        assert third.stop_token_ids == (2, special["<|user|>"], special["<|observation|>"])


@pytest.fixture(scope="module")
def place() -> Path:
    return golden_folder("e2e_chatglm3_6b", "expected.json", "tokenizer.model")


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((place / "expected.json").read_text("utf-8"))
    return values


@pytest.fixture(scope="module")
def small(place: Path) -> ChatGLM2Tokenizer:
    found = load_tokenizer(place)
    assert isinstance(found, ChatGLM2Tokenizer)
    assert found.version == 3
    return found


class TestEndToEnd:
    @staticmethod
    def answer(one: dict[str, Any], tokenizer: ChatGLM2Tokenizer) -> str:
        """As the original `chat` does it: without the last id, which it takes for the end."""
        return tokenizer.process_response(tokenizer.decode(one["output_ids"][:-1]))

    def test_single_questions(self, small: ChatGLM2Tokenizer, expected: dict[str, Any]) -> None:
        assert small.vocab_size == expected["vocab"]
        assert len(expected["single"]) == 11
        for one in expected["single"]:
            assert list(small.stop_token_ids) == one["eos_token_ids"]
            assert small.encode_messages(one["history"]) == one["input_ids"]
            history = one["history"][:-1]
            assert small.encode_prompt(one["query"], history) == one["input_ids"]
            assert self.answer(one, small) == one["response"]

    def test_session(self, small: ChatGLM2Tokenizer, expected: dict[str, Any]) -> None:
        first, *later = expected["session"]
        assert small.encode_messages(first["history"]) == first["input_ids"]
        parts = first["response"]
        # The random weights wrote words where a tool's name belongs.
        assert self.answer(first, small) == f"{parts['name']}\n{parts['content']}"
        for one in later:
            assert self.answer(one, small) == one["response"]
            ids = [small.special["[gMASK]"], small.special["sop"]]
            for message in one["history"]:
                metadata = message.get("metadata", "")
                ids += small.encode_message(message["role"], metadata, message["content"])
            assert [*ids, small.special["<|assistant|>"]] == one["input_ids"]


def test_a_system_message_and_tools(chatglm3_folder: Path) -> None:
    tokenizer = ChatGLM2Tokenizer.from_folder(chatglm3_folder)
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ids = tokenizer.encode_messages(messages, [{"type": "function", "function": function}])
    written = json.dumps([function], indent=4)
    system = (
        "be brief\nAnswer the following questions as best as you can. "
        f"You have access to the following tools:\n{written}"
    )
    assert ids == [
        tokenizer.special["[gMASK]"],
        tokenizer.special["sop"],
        *tokenizer.encode_message("system", "", system),
        *tokenizer.encode_message("user", "", "hi"),
        tokenizer.special["<|assistant|>"],
    ]


def test_words_before_a_call_are_a_message_of_their_own(chatglm3_folder: Path) -> None:
    tokenizer = ChatGLM2Tokenizer.from_folder(chatglm3_folder)
    function = {"name": "f", "arguments": '{"a-b": true, "from": [1, null], "c": "d"}'}
    call = {"role": "assistant", "content": "wait", "tool_calls": [{"function": function}]}
    ids = tokenizer.encode_messages(
        [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "1"}]
    )
    code = f"{PYTHON_CALL}**{{'a-b': True}}, **{{'from': [1, None]}}, c='d')\n```"
    assert ids[2:-1] == [
        *tokenizer.encode_message("user", "", "hi"),
        *tokenizer.encode_message("assistant", "", "wait"),
        *tokenizer.encode_message("assistant", "f", code),
        *tokenizer.encode_message("tool", "", "1"),
    ]


def test_the_beginning_of_the_next_message_is_shown(chatglm3_folder: Path) -> None:
    tokenizer = ChatGLM2Tokenizer.from_folder(chatglm3_folder)
    ids = [*tokenizer.encode("\n fox"), tokenizer.special["<|assistant|>"], *tokenizer.encode("f")]
    assert tokenizer.decode([*ids, tokenizer.special["<|user|>"], 2]) == "\n fox<|assistant|>f"
    assert tokenizer.process_response("\n fox<|assistant|>\n dog ") == "dog"


class TestVersion:
    @pytest.mark.parametrize(
        ("tokenizer_config", "config", "version"),
        [
            ({}, None, 3),
            ({"name_or_path": "THUDM/chatglm2-6b"}, None, 2),
            ({"name_or_path": "THUDM/chatglm3-6b"}, None, 3),
            ({}, {"_name_or_path": "/models/ChatGLM2-6B-int4"}, 2),
            ({"chat_template": "<|user|>"}, {"_name_or_path": "chatglm2"}, 3),
        ],
    )
    def test_of_a_folder(
        self,
        chatglm3_folder: Path,
        tmp_path: Path,
        tokenizer_config: dict[str, Any],
        config: Any,
        version: int,
    ) -> None:
        (tmp_path / "tokenizer.model").symlink_to(chatglm3_folder / "tokenizer.model")
        write_config(tmp_path, **tokenizer_config)
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        found = load_tokenizer(tmp_path)
        assert isinstance(found, ChatGLM2Tokenizer)
        assert found.version == version
        other = ChatGLM2Tokenizer.from_folder(tmp_path, version=5 - version)
        assert other.version == 5 - version

    def test_another_one_is_refused(self, chatglm3_folder: Path) -> None:
        with pytest.raises(ConfigError, match="version is 4"):
            ChatGLM2Tokenizer(chatglm3_folder / "tokenizer.model", version=4)

    def test_the_file_of_chatglm_6b_is_refused(self, train_file: TrainFile) -> None:
        with pytest.raises(CheckpointError, match=r"ice_text\.model of ChatGLM-6B"):
            ChatGLM2Tokenizer(train_file())
