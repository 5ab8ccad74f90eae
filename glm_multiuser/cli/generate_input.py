"""The input of `glm-multiuser generate`: lines of a file or of stdin, and the jobs in them."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.errors import ConfigError, GLMMultiUserError, InvalidParameterError
from glm_multiuser.sampling_params import SamplingParams, biases_by_id
from glm_multiuser.structured.grammar import Grammar

STDIN = Path("-")
OWN_FIELDS = ("prompt", "history", "user", "json_schema")
"""Fields of a JSON line besides those of `SamplingParams`."""


@dataclass(frozen=True)
class Job:
    """A prompt and its line; `error` is set if it cannot be submitted."""

    index: int
    line: int
    prompt: Union[str, list[int]]
    params: SamplingParams
    history: Sequence[Any] = ()
    user: Union[int, str, None] = None
    error: Optional[GLMMultiUserError] = None


def is_input(out: Path, file: Path) -> bool:
    """Whether `out` is the file that `read_lines` reads, perhaps as stdin."""
    if file != STDIN:
        return out.samefile(file)
    try:
        return os.path.samestat(out.stat(), os.fstat(sys.stdin.fileno()))
    except OSError:  # a stdin that is no file
        return False


def read_lines(file: Path) -> list[str]:
    """Reads the lines of a file or stdin. Only line feeds end a line, because prompts may contain
    other Unicode separators.

    Raises:
        ConfigError: the file is unreadable, or not UTF-8.
    """
    name = "stdin" if file == STDIN else str(file)
    try:
        content = sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{name} is in UTF-16; prompts must be in UTF-8")
    if b"\0" in content:
        raise ConfigError(f"{name} is binary; prompts must be text")
    try:
        return content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name} is not in UTF-8: {error.reason} in line {line}") from None


def read_jobs(lines: Iterable[str], params: SamplingParams) -> Iterator[Job]:
    """Yields one job per non-empty line.

    Args:
        lines: lines of the input.
        params: defaults of the sampling parameters.
    """
    filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for index, (number, line) in enumerate(filled):
        job = Job(index, number, line, params)
        yield read_object(job, line) if line.startswith("{") else job


def read_object(job: Job, line: str) -> Job:
    """Parses a line of JSON; an invalid one becomes the job's error.

    The engine checks the history and the user.
    """
    try:
        values = json.loads(line)
        json.dumps(values, allow_nan=False)  # Python reads NaN and 1e999, which are no JSON
    except (ValueError, RecursionError) as error:
        return failed(job, f"it begins with {{ and is not JSON: {error}")
    prompt = values.pop("prompt", None)
    if not isinstance(prompt, (str, list)):
        return failed(job, f"prompt is {prompt!r}; it must be a text or token ids")
    job = replace(
        job, prompt=prompt, history=values.pop("history", ()), user=values.pop("user", None)
    )
    known = [one.name for one in fields(job.params) if one.name != "grammar"]
    schema = values.pop("json_schema", None)
    for name in values:
        if name not in known:
            return failed(job, f"{name} is no field; those are {', '.join((*OWN_FIELDS, *known))}")
    try:
        if isinstance(values.get("logit_bias"), dict):
            values["logit_bias"] = biases_by_id(values["logit_bias"])
        if schema is not None:
            values["grammar"] = Grammar.json_schema(schema)
        return replace(job, params=replace(job.params, **values))
    except InvalidParameterError as error:
        return replace(job, error=error)


def failed(job: Job, problem: str) -> Job:
    return replace(job, error=InvalidParameterError(problem))
