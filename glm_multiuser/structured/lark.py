"""Rewrites grammars in the syntax of Lark or of llama.cpp (GBNF) for llguidance."""

from __future__ import annotations

import json
import re

from glm_multiuser.structured.gbnf import is_gbnf, lark_of
from glm_multiuser.structured.grammar import check_schema
from glm_multiuser.structured.json_schema import for_llguidance
from glm_multiuser.structured.regex_size import check_lark

SCHEMA = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<json>%json\s*)')
"""`%json`, or a text, comment or regular expression, in which it means nothing."""


def as_lark(grammar: str) -> str:
    """Returns the grammar in the syntax of Lark as llguidance reads it.

    Raises:
        InvalidParameterError: a syntax error in GBNF, or too large.
    """
    text = lark_of(grammar) if is_gbnf(grammar) else grammar
    check_lark(text)
    return _with_rewritten_schemas(text)


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
