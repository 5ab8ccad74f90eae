"""Limits the length of regular expressions with their counted repetitions expanded.

llguidance expands texts before its limits apply: `((a{1000}){1000}){100}` would become a text of
100 million characters in every state of the lexer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from glm_multiuser.errors import InvalidParameterError

WRITTEN_MAX = 10_000
"""Maximum of characters that all counted repetitions of a grammar add."""
GROUP_MAX = 1000
"""Maximum of characters of one repeated group: compile time may grow with their square."""
SUFFIXES_MAX = 4000
"""Maximum of `*`, `+` and `?` in a regular expression or a Lark grammar, for the same reason."""

Part = tuple[str, int]
"""("(", 0), (")", 0), ("times", count), ("suffix", 1) of `*`, `+`, `?`, or ("text", length)."""

REGEX = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\{\s*0*(\d{0,7})[\d\s,]*\}|\[\^?\]?|.", re.DOTALL)
LARK = re.compile(
    r'(?://|#)[^\n]*|(?P<text>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)'
    r"|(?P<name>\b_?[A-Z]\w*)(?P<defines>\s*:)?|[{~]\s*0*(?P<count>\d{0,7})|[()*+?\[\]]|\w+"
)


def check_regexes(patterns: Iterable[str]) -> None:
    """Checks all patterns of one grammar.

    Raises:
        InvalidParameterError: their repetitions are too large, or too many.
    """
    all_parts = [(pattern, list(_regex_parts(pattern))) for pattern in patterns]
    _check(sum(_length(parts) - len(pattern) for pattern, parts in all_parts))
    for _, parts in all_parts:
        _check_suffixes(sum(kind == "suffix" for kind, _ in parts))


def check_lark(text: str) -> None:
    """Checks a Lark grammar, whose terminals may refer to others, which multiplies repetitions.

    Raises:
        InvalidParameterError: its repetitions are too large, or too many.
    """
    lengths: dict[str, int] = {}
    bodies: dict[str, list[re.Match[str]]] = {}
    body = bodies.setdefault("", [])
    for match in LARK.finditer(text):
        if match["defines"]:
            body = bodies.setdefault(match["name"], [])
        else:
            body.append(match)

    def length_of(name: str) -> int:
        if name not in lengths:
            lengths[name] = 1  # for a terminal that refers to itself, which llguidance rejects
            lengths[name] = _length(parts(bodies.get(name, [])))
        return lengths[name]

    def parts(matches: Iterable[re.Match[str]]) -> Iterator[Part]:
        for match in matches:
            if match["text"]:
                yield "text", _length(_regex_parts(match["text"][1:-1]))
            elif match["name"]:
                yield "text", length_of(match["name"])
            elif match["count"] is not None:
                yield "times", int(match["count"] or 1)
            elif match[0] in "([)]":
                yield "(" if match[0] in "([" else ")", 0
            elif match[0] in "*+?":
                yield "suffix", 1

    try:
        _check(sum(map(length_of, bodies)) - len(text))
        _check_suffixes(sum(_suffixes(match[0]) for body in bodies.values() for match in body))
    except RecursionError:
        raise InvalidParameterError(
            "grammar has too many terminals that name each other", "grammar"
        ) from None


def _regex_parts(pattern: str) -> Iterator[Part]:
    classes = 0
    for match in REGEX.finditer(pattern):
        if match[0].startswith("["):
            classes += 1
        elif classes:
            classes -= match[0] == "]"
            if not classes:
                yield "text", 1
        elif match[0] in "()":
            yield match[0], 0
        elif match[1] is not None:
            yield "times", int(match[1] or 1)
        else:
            yield "suffix" if match[0] in "*+?" else "text", 1


def _length(parts: Iterable[Part]) -> int:
    outer: list[int] = []
    total = last = 0
    for kind, number in parts:
        if kind == "(":
            outer.append(total)
            total = last = 0
        elif kind == ")":
            last = total
            total += outer.pop() if outer else 0
        elif kind == "times":
            written = last * max(number, 1)
            if number > 1 and last > 1 and written > GROUP_MAX:
                raise _too_long("a group", written, GROUP_MAX)
            total += written - last
            last = written
        else:
            total += number
            last = last + number if kind == "suffix" else number
    return total + sum(outer)


def _check(added: int) -> None:
    if added > WRITTEN_MAX:
        raise _too_long("all", added, WRITTEN_MAX)


def _suffixes(token: str) -> int:
    """Returns the number of suffixes in a token of a Lark grammar."""
    if token.startswith("/"):
        return sum(kind == "suffix" for kind, _ in _regex_parts(token[1:-1]))
    return token in ("*", "+", "?")


def _check_suffixes(count: int) -> None:
    if count > SUFFIXES_MAX:
        raise InvalidParameterError(
            f"grammar has {count} of *, + and ?; it may have at most {SUFFIXES_MAX}", "grammar"
        )


def _too_long(what: str, length: int, limit: int) -> InvalidParameterError:
    return InvalidParameterError(
        f"grammar has counted repetitions; those of {what} are {length} characters when they are "
        f"written out, and may be at most {limit}",
        "grammar",
    )
