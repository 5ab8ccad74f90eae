"""Reads and writes tool calls as JSON, and in ChatGLM3's Python-like form.

Models write these texts, so nothing here evaluates them: only a call with constant arguments is
accepted.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

LONGEST_CALL = 20_000
"""Characters; longer text is not parsed, because Python's parser recurses without a limit."""

DEEPEST = 64
"""Nesting depth of lists and objects; deeper ones would exhaust Python's stack."""

FENCE, FENCE_END = "```python\n", "```"
JSON_CALL = re.compile(r"\w+\(\*\*(\{.*\})\)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


def read_json_arguments(text: str) -> Optional[dict[str, Any]]:
    """Parses the text of a JSON object; returns None for anything else.

    Numbers are finite: 1e999 and integers too long for Python become the nearest float.
    """
    try:
        values = json.loads(
            text, parse_int=_integer, parse_float=_finite, parse_constant=_reject_constant
        )
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and levels(values) <= DEEPEST else None


def levels(value: Any) -> int:
    """Returns the nesting depth of lists and objects: 1 for a value that is neither."""
    found = 0
    level = [value]
    while level:
        found += 1
        objects = [one.values() for one in level if isinstance(one, Mapping)]
        lists = [one for one in level if isinstance(one, (list, tuple))]
        level = [inner for outer in [*objects, *lists] for inner in outer]
    return found


def write_python_call(arguments: Mapping[str, Any]) -> str:
    """Writes arguments as ChatGLM3 does: `tool_call(city='Beijing')` in a Markdown code fence.

    The format of PROMPT.md in THUDM/ChatGLM3. Names that cannot be keyword arguments in Python go
    into `**{...}`.
    """
    written = []
    for name, value in arguments.items():
        # Python's parser normalises names.
        same = unicodedata.normalize("NFKC", name) == name
        plain = same and name.isidentifier() and not keyword.iskeyword(name)
        written.append(f"{name}={value!r}" if plain else "**" + repr({name: value}))
    return f"{FENCE}tool_call({', '.join(written)})\n{FENCE_END}"


def read_python_call(text: str) -> Optional[str]:
    """Reads what `write_python_call` writes; the function may have any name.

    The content of `**{...}` may be JSON, which a grammar can enforce.

    Returns:
        The arguments as the text of a JSON object; None unless the text is one call of a plain
        name with constant keyword arguments.
    """
    code = text.strip()
    if code.startswith(FENCE) and code.endswith(FENCE_END):
        code = code[len(FENCE) : -len(FENCE_END)].strip()
    if len(code) > LONGEST_CALL:
        return None
    written = JSON_CALL.fullmatch(code)
    values = read_json_arguments(written.group(1)) if written else None
    try:
        if written and values is not None:
            write_json(values)  # raises if not valid JSON
            return written.group(1)
        call = ast.parse(code, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        arguments: dict[str, Any] = {}
        for argument in call.keywords:
            value = ast.literal_eval(argument.value)
            if argument.arg is not None:
                arguments[argument.arg] = value
            elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
                arguments.update(value)
            else:
                return None
        return write_json(arguments)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def write_json(value: Any) -> str:
    """Serialises a value as standard JSON that UTF-8 can encode.

    Raises:
        ValueError: a non-finite number, or a lone surrogate.
        TypeError: a value without a JSON form.
        RecursionError: too deep nesting.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode("utf-8")
    return text


def _finite(digits: str) -> float:
    return min(max(float(digits), -sys.float_info.max), sys.float_info.max)


def _integer(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:  # Python limits the number of digits
        return _finite(digits)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
