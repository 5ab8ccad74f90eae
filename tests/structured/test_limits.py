"""What grammars may cost, and what is said about those that cost more or cannot be served."""

from __future__ import annotations

import json
import resource
import time
from contextlib import suppress
from typing import Any, Callable

import pytest

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.structured.compiler import GrammarCompiler
from glm_multiuser.structured.grammar import PROPERTIES_MAX, Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from glm_multiuser.worker_threads import on_large_stack
from tests.structured.walking import compiler_of, may_be, tool

SECONDS = 1.0
"""Of processor time, of the caller's thread and the one that compiles."""
MEBIBYTES = 100


def doubled(keyword: str, levels: int = 30) -> dict[str, Any]:
    """2 to the power of `levels` leaves."""
    definitions: dict[str, Any] = {f"d{levels}": {"type": "string"}}
    for level in range(levels):
        next_level = {"$ref": f"#/$defs/d{level + 1}"}
        definitions[f"d{level}"] = (
            {"type": "object", "properties": {"a": next_level, "b": next_level}}
            if keyword == "properties"
            else {keyword: [next_level, next_level]}
        )
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested_names(levels: int = 12) -> dict[str, Any]:
    """20 to the power of `levels` properties."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        names = {"enum": [f"n{one}" for one in range(20)]}
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    return schema


def names_of_many() -> dict[str, Any]:
    """Each of 500 properties lists 300 names."""
    one = {"propertyNames": {"$ref": "#/$defs/n"}}
    names = {"enum": [f"n{number}" for number in range(300)]}
    return {"$defs": {"n": names}, "properties": {f"p{place}": one for place in range(500)}}


def chain(links: int = 1100) -> dict[str, Any]:
    """More levels, through references, than fit on a stack of 8 MB."""
    group = {one: "$defs" if one < links / 2 else "definitions" for one in range(links + 1)}
    schema: dict[str, Any] = {"$defs": {}, "definitions": {}, "$ref": "#/$defs/0"}
    for one in range(links):
        schema[group[one]][str(one)] = {"items": {"$ref": f"#/{group[one + 1]}/{one + 1}"}}
    schema[group[links]][str(links)] = {"type": "integer"}
    return schema


def many_names() -> dict[str, Any]:
    names = {"enum": [f"n{one}" for one in range(2000)]}
    return {"propertyNames": names, "additionalProperties": {"type": "integer"}}


def nested_lists() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(8):
        schema = {"type": "array", "items": schema, "minItems": 9, "maxItems": 9}
    return schema


BOMBS: dict[str, Callable[[], Grammar]] = {
    "itself": lambda: Grammar.json_schema({"$ref": "#"}),
    "all of itself": lambda: Grammar.json_schema({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "a list of itself": lambda: Grammar.json_schema(
        {"type": "object", "properties": {"next": {"$ref": "#"}, "other": {"$ref": "#"}}}
    ),
    "doubled allOf": lambda: Grammar.json_schema(doubled("allOf")),
    "doubled anyOf": lambda: Grammar.json_schema(doubled("anyOf")),
    "doubled properties": lambda: Grammar.json_schema(doubled("properties")),
    "nested names": lambda: Grammar.json_schema(nested_names()),
    "names of many": lambda: Grammar.json_schema(names_of_many()),
    "many names": lambda: Grammar.json_schema(many_names()),
    "many stars": lambda: Grammar.regex("(a|b)*" * 4100),
    "many stars of texts": lambda: Grammar.lark("start: A\nA: " + '"a"*' * 4100),
    "many stars of rules": lambda: Grammar.lark("start: " + '("a"|"b")*' * 4100),
    "nested lists": lambda: Grammar.json_schema(nested_lists()),
    "a million items": lambda: Grammar.json_schema({"type": "array", "minItems": 10**6}),
    "a long string": lambda: Grammar.json_schema({"type": "string", "minLength": 10**6}),
    "a large multiple": lambda: Grammar.json_schema({"type": "integer", "multipleOf": 10_000_019}),
    "multiples of each other": lambda: Grammar.json_schema(
        {"type": "number", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}
    ),
    "multiples that overflow": lambda: Grammar.json_schema(
        {"type": "number", "allOf": [{"multipleOf": 9973}, {"multipleOf": 1e-7}]}
    ),
    "the largest multiple": lambda: Grammar.json_schema({"type": "number", "multipleOf": 0.9973}),
    "a large multiple in a grammar": lambda: Grammar.lark(
        'start: %json {"type": "integer", "multipleOf": 300007}'
    ),
    "many properties": lambda: Grammar.json_schema(
        {"type": "object", "properties": {f"p{one}": {} for one in range(2000)}}
    ),
    "a pattern of many states": lambda: Grammar.json_schema(
        {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"}
    ),
    "a regex of many states": lambda: Grammar.regex("(a|b)*a(a|b){200}"),
    "nested counts": lambda: Grammar.regex("((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"),
    "a text of a million characters": lambda: Grammar.regex("(a{1000}){1000}"),
    "a suffix that is repeated": lambda: Grammar.regex("a+{5000}"),
    "a group without an upper limit": lambda: Grammar.regex("[)](a{100,}[)]?){100}"),
    "the same in a pattern": lambda: Grammar.json_schema(
        {"type": "object", "patternProperties": {"^(a{100,}){100}$": {}}, "minProperties": 1}
    ),
    "in a regex of a grammar": lambda: Grammar.lark("start: /(a{1000}){1000}/"),
    "in JSON of a grammar": lambda: Grammar.lark(
        'start: %json {"type": "string", "pattern": "^(a{1000}){1000}$"}'
    ),
    "in terminals": lambda: Grammar.lark('start: A\nA: B{1000} # )\nB: "a"{1000}'),
    "doubled terminals": lambda: Grammar.lark(
        'start: A0\nA20: "a"\n' + "".join(f"A{at}: A{at + 1} A{at + 1}\n" for at in range(20))
    ),
    "a chain of terminals": lambda: Grammar.lark(
        'start: A0\nA2000: "a"\n' + "".join(f"A{at}: A{at + 1}\n" for at in range(2000))
    ),
    "a chain of rules": lambda: Grammar.lark(
        'start: r0\nr4000: "a"\n' + "".join(f"r{at}: r{at + 1}\n" for at in range(4000))
    ),
    "an ambiguous grammar": lambda: Grammar.lark('start: a\na: a a a | "x" |'),
    "brackets": lambda: Grammar.json_schema('{"a":' * 5000 + "1" + "}" * 5000),
    "a long text": lambda: Grammar.regex("a" * 100_000),
}


@pytest.fixture(scope="module")
def compiler(chatglm3_tiny: ChatTokenizer) -> GrammarCompiler:
    made = compiler_of(chatglm3_tiny)
    made.compile(Grammar.json_object())
    return made


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Processor time of each compilation, on its own thread."""
    times: list[float] = []

    def measured(function: Callable[[], Any]) -> Any:
        def run() -> Any:
            try:
                return function()
            finally:
                times.append(time.thread_time())

        return on_large_stack(run)

    monkeypatch.setattr("glm_multiuser.structured.compiler.on_large_stack", measured)
    return times


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little(compiler: GrammarCompiler, spent: list[float], name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    with suppress(InvalidParameterError):
        compiler.compile(BOMBS[name]())
    assert time.thread_time() - start + sum(spent) < SECONDS
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert used < MEBIBYTES * 1024


def test_a_chain_of_references_is_compiled(compiler: GrammarCompiler) -> None:
    assert compiler.compile(Grammar.json_schema(chain())).allowed().any()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"),
        Grammar.regex(r"(\w{1,40} ){100}\p{Greek}[{]{3}"),
        Grammar.regex("[a-z]{9000}|.{0,60000}"),
        Grammar.lark("start: " + '"w?? 1" ' * 2500),
        Grammar.json_schema(
            {"properties": {f"p{one}": {"pattern": r"^\+?\d+(?:\.\d*)?$"} for one in range(900)}}
        ),
        Grammar.json_schema({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2})?$"}),
        Grammar.json_schema(
            {"properties": {str(one): {"multipleOf": one} for one in (0.01, 7, 365, 1440, 100_000)}}
        ),
        Grammar.lark('start: row{8} END\nrow: CELL{8} "\\n"\nCELL: /[0-9]{2}/\nEND: "."'),
        Grammar.lark('root ::= [a-z]{3} "-" [0-9]{4}'),
    ],
)
def test_usual_counts_are_served(compiler: GrammarCompiler, grammar: Grammar) -> None:
    assert compiler.compile(grammar).allowed().any()


def test_an_object_may_have_as_many_optional_properties(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer
) -> None:
    names = [f"p{one}" for one in range(PROPERTIES_MAX)]
    grammar = Grammar.json_schema({"type": "object", "properties": {name: {} for name in names}})
    text = json.dumps({names[0]: 1, names[-1]: 2, "other": 3})
    assert may_be(compiler, chatglm3_tiny, grammar, text)


def test_a_string_with_a_maximum_may_be_long(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer
) -> None:
    grammar = Grammar.json_schema({"type": "string", "maxLength": 20_000})
    assert may_be(compiler, chatglm3_tiny, grammar, json.dumps("It is sunny in London. " * 400))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar("xml", "a"), "kind 'xml'; it must be one of json_schema, regex"),
        (lambda: Grammar.regex(""), "at least 1 character"),
        (lambda: Grammar.regex("\ud800"), "half of a surrogate pair"),
        (lambda: Grammar.regex("a" * 65_537), "65537 characters; it may have at most 65536"),
        (lambda: Grammar.regex("a{1000}{2}"), "a group are 2000 characters when they are written"),
        (lambda: Grammar.regex("a{9000}b{2000}"), "and may be at most 10000"),
        (lambda: Grammar.json_schema({"pattern": "(ab){501}"}), "1002 characters"),
        (lambda: Grammar.regex("\\"), "ends in a backslash that escapes nothing"),
        (lambda: Grammar.regex("a|b\\\\\\"), "ends in a backslash that escapes nothing"),
        (lambda: Grammar.json_schema("[1"), "is not JSON"),
        (lambda: Grammar.json_schema("[]"), "must be a JSON object"),
        (lambda: Grammar.json_schema({"a": object()}), "cannot be written as JSON"),
        (lambda: Grammar.json_schema("[" * 65), "65 levels of lists and objects; it may have"),
        (lambda: Grammar.json_schema({"minItems": 10_001}), "minItems 10001; it may be at most"),
        (lambda: Grammar.json_schema({"x": dict.fromkeys(map(str, range(1001)))}), "1001 prop"),
        (lambda: Grammar.json_schema({"multipleOf": 1.0007}), "multipleOf 1.0007; without decimal"),
        (
            lambda: Grammar.json_schema(
                {"$ref": "#/a", "a": {"multipleOf": 997}, "multipleOf": 7.1}
            ),
            "multipleOf 997 beside others; without decimal points, the least common multiple",
        ),
        (lambda: Grammar.choice([]), "at least 1 text"),
        (lambda: Grammar.choice(["a"] * 1025), "1025 texts; it may have at most 1024"),
        (lambda: Grammar.tool_call([]), "at least 1 function"),
        (lambda: Grammar.tool_call([{"type": "function"}]), "each needs a name"),
        (
            lambda: Grammar.tool_call([{"function": {"name": "f", "parameters": {"type": 7}}}]),
            "function 'f' with parameters of type 7; it must be 'object'",
        ),
    ],
)
def test_what_no_compiler_sees(make: Callable[[], Grammar], words: str) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        make()
    assert words in str(raised.value)
    assert raised.value.field == "grammar"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"not": {}}), "not"),
        (Grammar.json_schema({"propertyNames": {"pattern": "^a"}}), "propertyNames"),
        (Grammar.json_schema(nested_names()), "the limit is 262144"),
        (Grammar.json_schema(names_of_many()), "the limit is 262144"),
        (Grammar.json_schema({"type": "string", "format": "idn-email"}), "idn-email"),
        (Grammar.json_schema({"type": "strin"}), "strin"),
        (Grammar.json_schema({"$ref": "http://example.com/x"}), "example.com"),
        (Grammar.json_schema(False), "not"),
        (Grammar.regex("(("), "cannot be served"),
        (
            Grammar.tool_call([tool("f"), tool("g", {"not": {}}), tool("h")]),
            "parameters of function 'g': the grammar: Unimplemented keys: [\"not\"]",
        ),
        (
            Grammar.tool_call([tool("f")], required=False, content={"not": {}}),
            "of kind tool_call cannot be served: the grammar: Unimplemented keys",
        ),
        (Grammar.lark("start: other"), "other"),
        (Grammar.lark('start: %json {"multipleOf": 10007}'), "multipleOf 10007; without decimal"),
    ],
)
def test_what_cannot_be_served(compiler: GrammarCompiler, grammar: Grammar, words: str) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        compiler.compile(grammar)
    assert words in str(raised.value)
    assert raised.value.field == "grammar"


def test_a_schema_cannot_change_how_white_space_is_written(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer
) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    matcher = compiler.compile(Grammar.json_schema(json.dumps(schema)))
    for token_id in chatglm3_tiny.encode_inside(chatglm3_tiny.content_header() + "{"):
        matcher.accept(token_id)
    table = chatglm3_tiny.token_table(chatglm3_tiny.vocab_size)
    allowed = {table[one] for one in matcher.allowed().nonzero()[0]}
    assert allowed & {b" ", b"\n"} == set()
