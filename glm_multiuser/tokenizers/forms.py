"""How answers are written, as rules of a grammar in Lark's syntax as llguidance reads it.

A rule is the right side of one: literals, names of other rules such as `@content`, and `<[12]>` for
the special token 12.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

ANY_TEXT = r"/(.|\n)+/"


def literal(text: str) -> str:
    """The rule of exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def special_token(token_id: int) -> str:
    """The rule of exactly this special token."""
    return f"<[{token_id}]>"


def text_without(word: str) -> str:
    """The rule of any text of at least a character in which `word` does not occur."""
    escaped = "".join(f"\\x{ord(one):02x}" if not one.isalnum() else one for one in word)
    return rf"/(.|\n)+/ & ~/(.|\n)*{escaped}(.|\n)*/"


def sequence(*rules: str) -> str:
    """One after the other; empty ones are left out."""
    return " ".join(filter(None, rules))


def one_of(rules: Sequence[str]) -> str:
    """Any of them."""
    return "(" + " | ".join(rules) + ")"
