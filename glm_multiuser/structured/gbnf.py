"""Converts GBNF, llama.cpp's grammar syntax (grammars/README.md there), to Lark's.

Every character becomes a symbol of its own. As terminals, texts and classes would match as much as
they can, and `word "x"` with `word ::= [a-z]+` could not end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from glm_multiuser.errors import InvalidParameterError, shown

RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
TOKEN = re.compile(
    r"""
      (?P<space>\s+|\#[^\r\n]*)
    | (?P<text>"(?:\\.|[^"\\])*")
    | (?P<chars>\[\^?(?:\\.|[^\]\\])*\])
    | (?P<rule>[\w-]+)[ \t]*::=
    | (?P<name>[\w-]+)
    | (?P<any>\.)
    | (?P<sign>[()|*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    """,
    re.VERBOSE | re.DOTALL,
)
CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt])|([\\\"\[\]-]))|([^\\])",
    re.DOTALL,
)
CONTROL = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(grammar: str) -> bool:
    """Whether a line begins with a rule of GBNF, as none of Lark's does."""
    return RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """Converts a grammar.

    Raises:
        InvalidParameterError: a syntax error, or a rule that is missing or defined twice.
    """
    names: dict[str, str] = {"root": "start"}
    defined: set[str] = set()
    lines: list[list[str]] = []
    at = 0
    while at < len(grammar):
        token = TOKEN.match(grammar, at)
        if token is None or (not lines and token.lastgroup not in ("space", "rule")):
            line = 1 + grammar.count("\n", 0, at)
            raise _wrong(f"line {line}, at {shown(grammar[at : at + 30])}")
        at = token.end()
        kind = str(token.lastgroup)
        if kind == "rule":
            if token[kind] in defined:
                raise _wrong(f"rule {shown(token[kind])} is defined twice")
            defined.add(token[kind])
            lines.append([f"{_name(token[kind], names)}:"])
        elif kind != "space":
            lines[-1] += _symbols(kind, token[kind], names)
    missing = sorted(names.keys() - defined)
    if missing:
        raise _wrong(f"rule {shown(missing[0])} is not defined")
    return "".join(_written(line) for line in lines)


def _symbols(kind: str, text: str, names: dict[str, str]) -> list[str]:
    if kind == "text":
        characters = [json.dumps(one, ensure_ascii=False) for one, _ in _characters(text[1:-1])]
        return ["(", *characters, ")"]
    if kind == "chars":
        return [_regex_of_class(text[1:-1])]
    if kind == "any":
        return ["/(?s:.)/"]
    return [_name(text, names) if kind == "name" else text]


def _name(name: str, names: dict[str, str]) -> str:
    """Returns the name in Lark, where a rule has lower-case letters, digits and underscores."""
    plain = re.sub(r"[^a-z0-9]", "_", name.lower())
    return names.setdefault(name, f"rule_{len(names)}_{plain}")


def _regex_of_class(text: str) -> str:
    negated = text.startswith("^")
    characters = list(_characters(text[negated:]))
    written = "^" if negated else ""
    at = 0
    while at < len(characters):
        written += rf"\u{{{ord(characters[at][0]):x}}}"
        if characters[at + 1 : at + 2] == [("-", False)] and at + 2 < len(characters):
            written += rf"-\u{{{ord(characters[at + 2][0]):x}}}"
            at += 2
        at += 1
    return f"/[{written}]/"


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Yields each character, and whether it was written as an escape."""
    at = 0
    while at < len(text):
        one = CHARACTER.match(text, at)
        if one is None:
            raise _wrong(f"escape {text[at : at + 2]!r}")
        at = one.end()
        digits = one[1] or one[2] or one[3]
        if digits and (0xD800 <= int(digits, 16) < 0xE000 or int(digits, 16) > 0x10FFFF):
            raise _wrong(f"escape {one[0]!r}, which is no character")
        plain = CONTROL.get(one[4]) or one[5] or one[6]
        yield (chr(int(digits, 16)) if digits else plain, one[6] is None)


def _written(line: list[str]) -> str:
    """Returns a rule; empty alternatives become empty texts."""
    symbols: list[str] = []
    for symbol in [*line, ""]:
        if symbol in ("|", ")", "") and symbols[-1][-1] in ":|(":
            symbols.append('""')
        symbols.append(symbol)
    return " ".join(symbols) + "\n"


def _wrong(problem: str) -> InvalidParameterError:
    return InvalidParameterError(f"grammar of kind grammar is not valid GBNF: {problem}", "grammar")
