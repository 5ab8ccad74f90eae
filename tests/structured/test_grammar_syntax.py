"""Grammars in the syntax of Lark and of llama.cpp."""

from __future__ import annotations

import pytest

from glm_multiuser import InvalidParameterError
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.walking import compiler_of, may_be

NUMBER = '{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}'
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
OBJECT = '{"type": "object", "properties": {"a": {"const": 1}}}'


def allows(tokenizer: ChatTokenizer, grammar: str, text: str) -> bool:
    return may_be(compiler_of(tokenizer), tokenizer, Grammar.lark(grammar), text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u0041BC"', "ABC"),
        (r'root ::= "caf\u00e9s"', "cafés"),
        (r'root ::= "\U0001F600" [\u4e00-\u9fff]', "😀你"),
        (r"root ::= [\u00e9ab]", "b"),
        (r'root ::= [\u0020-\u007E]+ "\n"', "a ~\n"),
        (r'root ::= [^\u0000-\u001F"] "\u0022"', 'x"'),
        (r'root ::= "\\u0041"', r"\u0041"),
        (r'root ::= "\x41"', "A"),
        ("# of start: x\nroot ::= [0-9]", "7"),
        ('root ::= start "a"\nstart ::= "b"', "ba"),
        ('root ::= x1 X1 x-1 x_1\nx1 ::= "1"\nX1 ::= "2"\nx-1 ::= "3"\nx_1 ::= "4"', "1234"),
        ('root ::= ( | "a") "b" |', "b"),
        ('root ::= [-+] [a-c-] [a-c-9] [^-] . [\\]\\["]', "-c-x\n]"),
        ('root ::= "ab"{2,3} ( "c" |\n  "d" # or\n)+', "ababdc"),
        ('root ::= word "x"\nword ::= [a-z]+', "abxx"),
        ('root ::= name " " name\nname ::= [A-Za-z ]+', "Bob B Lee"),
        ('root ::= ("a" | "ab") "b"', "ab"),
        (ARITHMETIC, "1+(x2 -3)=4\na= 2 \n"),
    ],
)
def test_gbnf(chatglm3_tiny: ChatTokenizer, grammar: str, text: str) -> None:
    """As llama.cpp reads it, see its grammars/README.md."""
    assert allows(chatglm3_tiny, grammar, text)
    assert not allows(chatglm3_tiny, grammar, "\x1f" + text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('?start: expr\n?expr: expr "+" term | term\nterm: /[0-9]/', "1+2"),
        ('start[max_tokens=9]: "a"', "a"),
        ('%llguidance {}\nstart: "root ::= b"', "root ::= b"),
        (r'start: "%json {}"', "%json {}"),
        ('// %json {}\nstart: /%json 1/ "a"', "%json 1a"),
        (f"start: %json {NUMBER}", "0.5"),
        (f'start: "<" %json {OBJECT} ">" %json {NUMBER}', '<{"a": 1}>0.25'),
    ],
)
def test_lark(chatglm3_tiny: ChatTokenizer, grammar: str, text: str) -> None:
    assert allows(chatglm3_tiny, grammar, text)


@pytest.mark.parametrize(
    ("schema", "text"), [(NUMBER, "0"), (NUMBER, "0.0"), (OBJECT, '{"a":  1}'), (OBJECT, "{ }")]
)
def test_schemas_in_a_grammar_are_read_as_others(
    chatglm3_tiny: ChatTokenizer, schema: str, text: str
) -> None:
    assert not allows(chatglm3_tiny, f"start: %json {schema}", text)


def test_annotations_of_a_schema_in_a_grammar(chatglm3_tiny: ChatTokenizer) -> None:
    grammar = 'start: %json {"type": "string", "format": "path", "maxLength": 3}'
    assert allows(chatglm3_tiny, grammar, '"a/b"')


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("root ::= word", "rule 'word' is not defined"),
        ('word ::= "a"', "rule 'root' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice"),
        ('root ::= "a"\n  <[12]>', r"line 2, at '<\[12\]>'"),
        ('root ::= "a', "line 1, at '\"a'"),
        ('"a"\nroot ::= "a"', 'line 1, at \'"a"'),
        (r'root ::= "\q"', r"escape '\\\\q'"),
        (r'root ::= "\ud83d"', "which is no character"),
    ],
)
def test_gbnf_that_is_not_valid(chatglm3_tiny: ChatTokenizer, grammar: str, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"is not valid GBNF: .*{problem}"):
        compiler_of(chatglm3_tiny).compile(Grammar.lark(grammar))
