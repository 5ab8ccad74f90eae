"""Whatever the documents import, or call by its full name, is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
IMPORT = re.compile(r"^ *from (glm_multiuser[\w.]*) import ([\w, ]+)", re.MULTILINE)
FULL_NAME = re.compile(r"`(glm_multiuser(?:\.\w+)+)\b")
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)")
PACKAGE = "".join(path.read_text("utf-8") for path in ROOT.glob("glm_multiuser/**/*.py"))


def imported(document: str) -> set[str]:
    """Names that a document's Python imports from this package, with their modules."""
    return {
        f"{module}.{name.strip()}"
        for block in CODE.findall(document)
        for module, names in IMPORT.findall(block)
        for name in names.split(",")
    }


def is_there(name: str) -> bool:
    """Of a module, or of something in one."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            if not hasattr(found, word):
                return False
            found = getattr(found, word)
        return True
    return False


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_name_is_there(path: Path) -> None:
    document = path.read_text("utf-8")
    names = imported(document) | set(FULL_NAME.findall(document))
    assert sorted(name for name in names if not is_there(name)) == []


def missing_members(document: str) -> list[str]:
    """`Class.member` of classes of this package, where nothing in it has the member's name."""
    return [
        f"{owner}.{member}"
        for owner, member in MEMBER.findall(document)
        if re.search(rf"^class {owner}\b", PACKAGE, re.MULTILINE)
        and not re.search(rf"\b{member}\b", PACKAGE)
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_member_is_there(path: Path) -> None:
    assert missing_members(path.read_text("utf-8")) == []


def test_a_name_that_is_gone_is_noticed() -> None:
    assert missing_members("`MultiUserLLM._gone`, `MultiUserLLM.chat`, `numpy.gone`") == [
        "MultiUserLLM._gone"
    ]
    assert is_there("glm_multiuser.config.EngineConfig")
    assert not is_there("glm_multiuser.models.registry.make_model")
    assert not is_there("glm_multiuser.config.Nothing")
