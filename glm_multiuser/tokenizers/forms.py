"""Grammar rules for answers, in llguidance's Lark syntax.

A rule is a right-hand side: literals, names of other rules such as `@content`, and `<[12]>` for
the special token 12. Lines that define names in it may follow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

ANY_TEXT = r"/(.|\n)+/"


def literal(text: str) -> str:
    """Matches exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def special_token(token_id: int) -> str:
    """Matches exactly this special token."""
    return f"<[{token_id}]>"


def text_without(word: str) -> str:
    """Matches any non-empty text without `word`; only as a terminal."""
    return rf"/(.|\n)+/ & ~/(.|\n)*{_escaped(word)}(.|\n)*/"


def text_up_to(word: str) -> str:
    """Matches any text that ends with `word`; lazily, the first one ends it."""
    return rf"/(.|\n)*{_escaped(word)}/"


def _escaped(word: str) -> str:
    return "".join(f"\\x{ord(one):02x}" if not one.isalnum() else one for one in word)


def sequence(*rules: str) -> str:
    """Matches the rules in order; empty ones are skipped."""
    return " ".join(filter(None, rules))


def one_of(rules: Sequence[str]) -> str:
    """Matches any of the rules."""
    return "(" + " | ".join(rules) + ")"
