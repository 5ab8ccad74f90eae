"""The JSON-Schema-Test-Suite (json-schema-org), which is in the source archive of jsonschema."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser import Grammar
from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.structured.compiler import GrammarCompiler

TESTS = "json/tests/draft2020-12/"


def download(folder: Path) -> Path:
    """The archive of the installed version."""
    wanted = f"jsonschema=={version('jsonschema')}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    result = subprocess.run([*command, "-d", str(folder), wanted], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"pip cannot download the source archive of {wanted}: {result.stderr[-300:]}")
    (archive,) = folder.glob("jsonschema-*.tar.gz")
    return archive


def suite(archive: Path) -> list[Any]:
    """Its schemas of draft 2020-12, in the order of their files."""
    with tarfile.open(archive) as files:
        members = [one for one in files.getmembers() if TESTS in one.name and one.isfile()]
        members = [one for one in members if one.name.split(TESTS)[1].endswith(".json")]
        found = []
        for member in sorted(members, key=lambda one: one.name):
            content = files.extractfile(member)
            assert content is not None
            found += [case["schema"] for case in json.load(content)]
    # Python's regular expressions, with which jsonschema judges, have no \p.
    return [schema for schema in found if r"\p{" not in str(schema).replace("\\\\", "\\")]


def served(compiler: GrammarCompiler, schemas: list[Any]) -> list[Any]:
    """Those that are not refused."""
    found = []
    for schema in schemas:
        with suppress(InvalidParameterError):
            compiler.compile(Grammar.json_schema(schema))
            found.append(schema)
    return found
