"""Whatever the documents import, or call by its full name, is there, and docs/api.md has every
parameter, field and error."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser import (
    CausalConfig,
    EngineConfig,
    EngineStats,
    ModelConfig,
    MultiUserLLM,
    SamplingParams,
    answer,
    errors,
)
from glm_multiuser.tokenizers import ChatTokenizer

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


API = (ROOT / "docs" / "api.md").read_text("utf-8")
HEADINGS = re.findall(r"^### (`\w+\(.*)$", API, re.MULTILINE)
TOKENIZERS = re.findall(r"^\| (`\w+\(.*?) \| ", API.partition("\n## Tokenizers\n")[2], re.MULTILINE)
METHODS = [
    (owner, *method)
    for owner, lines in ((MultiUserLLM, HEADINGS), (ChatTokenizer, TOKENIZERS))
    for line in lines
    for method in re.findall(r"`(\w+)\((.*?)\)(?: ->|`)", line)
]
DATACLASSES = [
    *(answer.GenerationResult, answer.Logprob, answer.Piece, answer.Timings, answer.Usage),
    *(CausalConfig, EngineConfig, EngineStats, ModelConfig, SamplingParams),
]


def test_every_method_is_documented() -> None:
    names = {name for name, one in inspect.getmembers(MultiUserLLM) if callable(one)}
    documented = re.findall(r"^### .*", API, re.MULTILINE)
    public = {name for name in names if not name.startswith("_")}
    assert public - set(re.findall(r"\w+", " ".join(documented))) == set()


@pytest.mark.parametrize(
    ("owner", "name", "documented"), METHODS, ids=[f"{one[0].__name__}.{one[1]}" for one in METHODS]
)
def test_parameters_are_those_of_the_method(owner: type, name: str, documented: str) -> None:
    function = getattr(owner, name)
    found = inspect.signature(function).parameters.values()
    shown = ast.parse(f"def documented({documented}): pass").body[0]
    assert isinstance(shown, ast.FunctionDef)
    by_name = [one.name for one in found if one.kind is one.KEYWORD_ONLY]
    by_position = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert [one.arg for one in shown.args.args] == [one for one in by_position if one != "self"]
    if shown.args.kwarg is None:
        assert [one.arg for one in shown.args.kwonlyargs] == by_name


@pytest.mark.parametrize("declared", DATACLASSES, ids=lambda declared: declared.__name__)
def test_every_field_is_documented(declared: Any) -> None:
    names = set(re.findall(r"`(\w+)`", API))
    assert {one.name for one in fields(declared)} - names == set()


def test_the_tree_of_errors_is_complete() -> None:
    (tree,) = re.findall(r"^```text\n(GLMMultiUserError\n.*?)^```", API, re.DOTALL | re.MULTILINE)
    classes = [one for one in vars(errors).values() if inspect.isclass(one)]
    assert set(re.findall(r"\w+Error\b", tree)) == {
        one.__name__ for one in classes if issubclass(one, errors.GLMMultiUserError)
    }
