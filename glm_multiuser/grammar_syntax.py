"""Rewrites grammars in the syntax of Lark or of llama.cpp (GBNF) for llguidance."""

from __future__ import annotations

import json
import re

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.grammar import check_schema
from glm_multiuser.grammar_size import check_lark
from glm_multiuser.json_schema import for_llguidance

RULE_OF_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
ESCAPE_OF_GBNF = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
SCHEMA = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<json>%json\s*)')
"""`%json`, or a text, comment or regular expression, in which it means nothing."""


def as_lark(grammar: str) -> str:
    """Returns the grammar in the syntax of Lark as llguidance reads it.

    Raises:
        InvalidParameterError: a syntax error in GBNF, or too large.
    """
    text = _converted(grammar) if RULE_OF_GBNF.search(grammar) else grammar
    check_lark(text)
    return _with_rewritten_schemas(text)


def _converted(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        text: str = gbnf_to_lark(ESCAPE_OF_GBNF.sub(_character, grammar))
        return text
    except Exception as error:  # the converter raises plain Exception
        raise InvalidParameterError(
            f"grammar of kind grammar is not valid GBNF: {error}", "grammar"
        ) from None


def _character(escape: re.Match[str]) -> str:
    r"""Returns the character of \uXXXX or \UXXXXXXXX, whose zeros the converter would drop."""
    digits = escape[1] or escape[2]
    if not digits:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        return escape[0]  # llguidance rejects it
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def _with_rewritten_schemas(text: str) -> str:
    """Returns a Lark grammar whose JSON schemas are checked and prepared as others are."""
    written, start = [], 0
    while match := SCHEMA.search(text, start):
        written.append(text[start : match.end()])
        start = match.end()
        if match["json"]:
            try:
                schema, end = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError):
                continue  # llguidance rejects it
            check_schema(schema)
            written.append(json.dumps(for_llguidance(schema)))
            start = end
    return "".join([*written, text[start:]])
