"""The tokenizer of GLM-4 against the original."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.errors import CheckpointError, InvalidParameterError
from glm_multiuser.tokenizers import ChatTokenizer, GLM4Tokenizer, load_tokenizer
from glm_multiuser.tokenizers.glm4 import SPECIAL_TOKENS
from tests.golden_data import golden_folder
from tests.tokenizers.conftest import write_config


@pytest.fixture(scope="module")
def folder() -> Path:
    return golden_folder("tokenizer_glm4", "golden.json", "tokenizer.model")


@pytest.fixture(scope="module")
def golden(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "golden.json").read_text("utf-8"))
    return values


@pytest.fixture(scope="module")
def real(folder: Path) -> GLM4Tokenizer:
    found = load_tokenizer(folder)
    assert isinstance(found, GLM4Tokenizer)
    return found


class TestAgainstTheOriginal:
    def test_ids_and_texts(self, real: GLM4Tokenizer, golden: dict[str, Any]) -> None:
        assert len(golden["cases"]) == 226
        with_prefixes = 0
        for one in golden["cases"]:
            ids = one["raw_ids"]
            assert real.encode(one["text"]) == ids
            assert real.decode(ids) == one["raw_decoded"]
            if "prefix_decoded" in one:
                with_prefixes += 1
                prefixes = [real.decode(ids[: end + 1]) for end in range(len(ids))]
                assert prefixes == one["prefix_decoded"]
            if one["ids_specials_parsed"] != ids:
                # Here the original reads special tokens in a text; this library must not.
                assert not set(real.special.values()).intersection(ids)
                assert any(name in one["text"] for name in SPECIAL_TOKENS)
        assert with_prefixes > 150

    def test_prompts(self, real: GLM4Tokenizer, golden: dict[str, Any]) -> None:
        assert len(golden["apply_chat_template"]) == 24
        for one in golden["apply_chat_template"]:
            *history, question = one["messages"]
            assert real.encode_messages(one["messages"]) == one["input_ids"]
            assert real.encode_prompt(question["content"], history) == one["input_ids"]

    def test_numbers_of_the_released_file(
        self, real: GLM4Tokenizer, golden: dict[str, Any]
    ) -> None:
        assert dict(real.special) == golden["special_ids"]
        assert real.vocab_size == max(real.special.values()) + 1
        assert real.stop_token_ids == (151329, 151336, 151338)


@pytest.fixture(scope="module")
def small(glm4_folder: Path) -> GLM4Tokenizer:
    return GLM4Tokenizer.from_file(glm4_folder / "tokenizer.model")


def test_tools_and_calls(small: GLM4Tokenizer) -> None:
    function = {"name": "f", "description": "天气", "parameters": {"type": "object"}}
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "22"},
    ]
    ids = small.encode_messages(messages, [{"type": "function", "function": function}])
    tools = (
        "你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具\n\n## f\n\n"
        f"{json.dumps(function, indent=4, ensure_ascii=False)}\n"
        "在调用上述函数时，请使用 Json 格式表示调用的参数。"
    )
    assert ids == [
        *(small.special["[gMASK]"], small.special["<sop>"]),
        *small.encode_message("system", "", tools),
        *small.encode_message("system", "", "be brief"),
        *small.encode_message("user", "", "hi"),
        *small.encode_message("assistant", "f", '{"a":1}'),
        *small.encode_message("tool", "", "22"),
        small.special["<|assistant|>"],
    ]


def test_the_beginning_of_the_next_message_is_shown(small: GLM4Tokenizer) -> None:
    ids = [*small.encode("\na"), small.special["<|assistant|>"], *small.encode("f\n{}")]
    assert small.decode([*ids, small.special["<|user|>"]]) == "\na<|assistant|>f\n{}"


def test_a_million_spaces(small: GLM4Tokenizer) -> None:
    assert small.encode("a" + " " * 1_000_000) == small.encode("a") + small.encode(" ") * 1_000_000


def in_the_layout_of_transformers(folder: Path, qwen2: Path, **config: str) -> ChatTokenizer:
    content = json.loads((qwen2 / "tokenizer.json").read_text("utf-8"))
    content["added_tokens"] = [
        {**content["added_tokens"][0], "content": name, "id": 1000 + place}
        for place, name in enumerate(SPECIAL_TOKENS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    write_config(folder, tokenizer_class="PreTrainedTokenizerFast", **config)
    found = load_tokenizer(folder)
    assert found is not None
    return found


def test_files_in_the_layout_of_transformers(qwen2_folder: Path, tmp_path: Path) -> None:
    found = in_the_layout_of_transformers(tmp_path, qwen2_folder)
    assert isinstance(found, GLM4Tokenizer)
    assert found.encode_prompt("<|user|>")[:3] == [1002, 1004, 1007]
    assert 1007 not in found.encode_prompt("<|user|>")[3:]


TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
WITH_TOOLS = (
    "[gMASK]<sop>{{% for item in messages %}}{{% if item['tools'] is defined %}}<|system|>\n"
    "{instruction}{{% set tools = item['tools'] %}}{{% for tool in tools %}}{{{{ tool }}}}"
    "{{% endfor %}}{{% endif %}}<|{{{{ item['role'] }}}}|>\n{{{{ item['content'] }}}}{{% endfor %}}"
    "<|assistant|>"
)
"""GLM-4's own template, shortened."""


class TestItsTemplate:
    def test_that_of_glm_edge(self, qwen2_folder: Path, tmp_path: Path) -> None:
        template = (
            "{% for item in messages %}<|{{ item['role'] }}|>\n{{ item['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        found = in_the_layout_of_transformers(
            tmp_path, qwen2_folder, chat_template=template, eos_token="<|endoftext|>"
        )
        user, assistant = found.special["<|user|>"], found.special["<|assistant|>"]
        assert found.encode_prompt("hi") == [user, *found.encode("\nhi"), assistant]
        assert found.stop_token_ids == (1000, user, found.special["<|observation|>"])
        assert found.answer_reader().feed("\nhello") == "hello"
        tools = [{"type": "function", "function": {"name": "f"}}]
        messages = [{"role": "user", "content": "hi"}]
        for call in (found.answer_reader, lambda tools: found.encode_messages(messages, tools)):
            with pytest.raises(InvalidParameterError, match="does not mention tools"):
                call(tools)

    def test_that_of_glm4_writes_no_tools_of_a_request(
        self, qwen2_folder: Path, tmp_path: Path
    ) -> None:
        """But those of a message."""
        template = WITH_TOOLS.format(instruction="")
        found = in_the_layout_of_transformers(
            tmp_path, qwen2_folder, chat_template=template, eos_token="<|user|>"
        )
        ids = found.encode_messages([{"role": "user", "content": "hi"}], TOOLS)
        assert "get_time" in found.decode(ids)

    @pytest.mark.parametrize("with_ranks", [True, False])
    def test_its_instruction_stands_before_tools(
        self, qwen2_folder: Path, glm4_folder: Path, tmp_path: Path, with_ranks: bool
    ) -> None:
        instruction = "你是一个名为 ChatGLM 的人工智能助手。\n\n# 可用工具"
        template = WITH_TOOLS.format(instruction=instruction)
        if with_ranks:
            ranks = (glm4_folder / "tokenizer.model").read_bytes()
            (tmp_path / "tokenizer.model").write_bytes(ranks)
            write_config(tmp_path, tokenizer_class="ChatGLM4Tokenizer", chat_template=template)
            found = load_tokenizer(tmp_path)
        else:
            found = in_the_layout_of_transformers(
                tmp_path, qwen2_folder, chat_template=template, eos_token="<|user|>"
            )
        assert isinstance(found, GLM4Tokenizer)
        ids = found.encode_messages([{"role": "user", "content": "hi"}], TOOLS)
        assert found.decode(ids).startswith(f"\n{instruction}\n\n## get_time\n\n{{")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:-1], b"!"], "line 261 is not"),
        (lambda lines: [*lines[:-1], b"IQ== x"], "line 261 is not"),
        (lambda lines: [*lines[:-1], b"I*== 260"], "line 261 is not"),
        (lambda lines: [*lines[:-1], b"IQ== 260"], "ranks must be 0, 1, 2"),
        (lambda lines: [*lines[:-1], base64.b64encode(b"ab") + b" 300"], "ranks must be"),
        (lambda lines: [b"aGVs 0", *lines[1:]], "no piece for the byte 0"),
    ],
)
def test_a_broken_file(glm4_folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    lines = (glm4_folder / "tokenizer.model").read_bytes().splitlines()
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(change(lines)))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.model" in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.model"):
        GLM4Tokenizer.from_file(tmp_path / "tokenizer.model")
