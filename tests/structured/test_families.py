"""Grammars with the tokenizer of every family, and logits that are random numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from glm_multiuser.errors import GenerationError, InvalidParameterError
from glm_multiuser.structured.compiler import GrammarCompiler
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from tests.checkpoint.gguf_content import gguf_model
from tests.structured.walking import compiler_of, may_be, tool, walk
from tests.tokenizers.test_gguf import MODELS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "mood": {"enum": ["好", "so so", None, 1.5]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "mood", "sizes", "inner"],
    "additionalProperties": False,
}
TOOLS = [
    tool("get_time", SCHEMA),
    tool("get_weather"),
    tool(
        "sum_up",
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["n"],
            "additionalProperties": False,
        },
    ),
]
PARAMETERS = {
    one["function"]["name"]: one["function"]["parameters"] or {"maxProperties": 0} for one in TOOLS
}


@pytest.mark.parametrize("name", MODELS)
def test_json_of_the_tokenizer_of_a_gguf_file(name: str) -> None:
    tokenizer = load_tokenizer(gguf_model(MODELS[name]))
    assert tokenizer is not None
    compiler = compiler_of(tokenizer)
    for seed in range(3):
        answer = walk(compiler, tokenizer, Grammar.json_schema(SCHEMA), seed, temperature=seed / 2)
        assert answer.complete
        jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_json_fits_its_schema(small_tokenizer: ChatTokenizer, temperature: float) -> None:
    compiler = compiler_of(small_tokenizer)
    for seed in range(5):
        answer = walk(
            compiler, small_tokenizer, Grammar.json_schema(SCHEMA), seed, temperature=temperature
        )
        assert answer.complete
        jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_a_regular_expression_may_end_in_an_escaped_backslash(
    small_tokenizer: ChatTokenizer,
) -> None:
    answer = walk(compiler_of(small_tokenizer), small_tokenizer, Grammar.regex("a\\\\"), 1)
    assert answer.text == "a\\"


def test_regular_expressions(small_tokenizer: ChatTokenizer) -> None:
    compiler = compiler_of(small_tokenizer)
    pattern = r"(yes|no|你好): \d{2,4}[a-f]+!"
    for seed in range(5):
        answer = walk(compiler, small_tokenizer, Grammar.regex(pattern), seed)
        assert answer.complete
        assert re.fullmatch(pattern, answer.text, re.ASCII)


@pytest.mark.parametrize(
    "text", [" x", "  x", " ", "\nx", "\n \n", "\u2028x", "a<|assistant|>b", "get\n{}", "a b "]
)
def test_no_character_of_content_is_lost(small_tokenizer: ChatTokenizer, text: str) -> None:
    compiler = compiler_of(small_tokenizer)
    for seed in range(5):
        answer = walk(compiler, small_tokenizer, Grammar.choice([text]), seed)
        tokens = small_tokenizer.answer_tokens(exact=True)
        assert (answer.text, b"".join(map(tokens.add, answer.token_ids))) == (text, text.encode())


def test_a_stop_token_that_the_model_does_not_have(small_tokenizer: ChatTokenizer) -> None:
    size = small_tokenizer.vocab_size
    compiler = GrammarCompiler(small_tokenizer, size, (*small_tokenizer.stop_token_ids, size))
    answer = walk(compiler, small_tokenizer, Grammar.choice(["yes"]), seed=0)
    assert (answer.text, answer.complete) == ("yes", True)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="its newest llguidance cuts such texts")
@pytest.mark.parametrize("text", ["\n" + "abcdefgh" * 6, 'say "' + "yes, " * 20 + '"', "\\" * 40])
def test_a_long_constant_text_is_allowed_whole(small_tokenizer: ChatTokenizer, text: str) -> None:
    grammar = Grammar.json_schema({"const": text})
    answer = walk(compiler_of(small_tokenizer), small_tokenizer, grammar, 0)
    assert json.loads(answer.text) == text


def test_choices(small_tokenizer: ChatTokenizer) -> None:
    compiler = compiler_of(small_tokenizer)
    texts = ["北京", "the quick fox", 'a "quoted" \\ word', "a\nb"]
    seen = {walk(compiler, small_tokenizer, Grammar.choice(texts), seed).text for seed in range(20)}
    assert seen <= set(texts)
    assert len(seen) > 1


@pytest.mark.parametrize(
    "text",
    ['start: "(" NUMBER ("+" NUMBER)* ")"\nNUMBER: /[0-9]/', 'root ::= "(" [0-9] ("+" [0-9])* ")"'],
)
def test_grammars(small_tokenizer: ChatTokenizer, text: str) -> None:
    answer = walk(compiler_of(small_tokenizer), small_tokenizer, Grammar.lark(text), 1)
    assert re.fullmatch(r"\(\d(\+\d)*\)", answer.text)


def test_a_grammar_cannot_write_special_tokens(small_tokenizer: ChatTokenizer) -> None:
    stop = small_tokenizer.stop_token_ids[0]
    grammar = Grammar.lark(f'start: "a" <[{stop}]> "b"')
    with pytest.raises(GenerationError, match="allows no token"):
        walk(compiler_of(small_tokenizer), small_tokenizer, grammar, 1)


def test_calls(small_tokenizer: ChatTokenizer) -> None:
    grammar = Grammar.tool_call(TOOLS)
    compiler = compiler_of(small_tokenizer)
    try:
        small_tokenizer.answer_reader(TOOLS)
    except InvalidParameterError:
        with pytest.raises(InvalidParameterError):
            compiler.compile(grammar)
        return
    seen = set()
    for seed in range(10):
        answer = walk(compiler, small_tokenizer, grammar, seed, TOOLS)
        assert answer.text == ""
        (call,) = answer.calls
        seen.add(call.name)
        jsonschema.validate(json.loads(call.arguments), PARAMETERS[call.name])
    assert len(seen) > 1


@pytest.mark.parametrize("content", [None, SCHEMA])
def test_content_or_strict_calls(small_tokenizer: ChatTokenizer, content: Any) -> None:
    compiler = compiler_of(small_tokenizer)
    grammar = Grammar.tool_call(TOOLS, required=False, content=content)
    try:
        small_tokenizer.answer_reader(TOOLS)
    except InvalidParameterError:
        return  # test_calls has what happens then
    kinds = set()
    for seed in range(12):
        answer = walk(compiler, small_tokenizer, grammar, seed, TOOLS)
        kinds.add(bool(answer.calls))
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), PARAMETERS[call.name])
        if content and answer.complete and not answer.calls:
            jsonschema.validate(json.loads(answer.text), content)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    "text", ["a<|assistant|>b", "<|assistant|>get_weather\n{}", "a</tool_call>b"]
)
def test_a_spelled_special_token_splits_no_answer(
    small_tokenizer: ChatTokenizer, text: str
) -> None:
    content = {"const": text}
    parameters = {"type": "object", "properties": {"a": content}, "required": ["a"]}
    tools = [tool("get_weather", {**parameters, "additionalProperties": False})]
    compiler = compiler_of(small_tokenizer)
    grammar = Grammar.tool_call(tools, required=False, content=content)
    try:
        small_tokenizer.answer_reader(tools)
    except InvalidParameterError:
        return  # test_calls has what happens then
    kinds = set()
    for seed in range(8):
        answer = walk(compiler, small_tokenizer, grammar, seed, tools)
        kinds.add(bool(answer.calls))
        for call in answer.calls:
            assert json.loads(call.arguments) == {"a": text}
        if not answer.calls:
            assert json.loads(answer.text) == text
    assert kinds == {True, False}


def test_tags_of_calls_may_be_text(qwen2_folder: Path, tmp_path: Path) -> None:
    """As in a vocabulary without tokens for them; every text before a call may be free."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((qwen2_folder / name).read_text("utf-8"))
        added = content.pop("added_tokens", [])
        content["added_tokens"] = [one for one in added if "tool_call" not in one["content"]]
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    compiler = compiler_of(tokenizer)
    grammar = Grammar.tool_call([TOOLS[2]], required=False)
    call = '<tool_call>\n{"name": "sum_up", "arguments": {"n": 7}}\n</tool_call>'
    for text in ("fine", call, f"wait. <tool {call}", f"{call}\n{call}", "a <tool_cal"):
        assert may_be(compiler, tokenizer, grammar, text), text
    wrong = call.replace("7", "0")
    for text in (wrong, f"a {wrong}", f"{call} b", "a <tool_call>"):
        assert not may_be(compiler, tokenizer, grammar, text), text
