"""Imports go one way through the package: a lower layer never needs a higher one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import glm_multiuser

PACKAGE = Path(glm_multiuser.__file__).parent

LAYERS = (
    {"checkpoint", "tokenizers"},
    {"structured"},
    {"sampling_params", "sampling"},
    {"sessions"},
    {"backends"},
    {"models"},
    {"engine"},
    {
        "llm",
        "input_processor",
        "generation",
        "stats",
        "build",
        "weights",
        "weight_cache",
        "handle",
        "answer",
        "memory",
        "backend_choice",
    },
    {"mindformers"},
    {"server"},
    {"deploy"},
    {"cli"},
)
"""Layers from bottom to top; modules in none of them are below all."""

SHARED = {"glm_multiuser.models.batch"}
"""Data of a step, passed from the engine through the models to the backends; imports nothing."""


def layer_of(module: str) -> int:
    """The number of a module's layer; -1 if it is below all."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0] if package == "glm_multiuser" else ""
    return next((number for number, names in enumerate(LAYERS) if name in names), -1)


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Package modules that a module imports at run time, without type-only imports."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "glm_multiuser":
            yield from (f"glm_multiuser.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_no_layer_imports_a_higher_one() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("glm_multiuser", *path.relative_to(PACKAGE).with_suffix("").parts))
        if module == "glm_multiuser.__init__":
            continue
        for imported in imports_of(ast.parse(path.read_text("utf-8"))):
            if imported not in SHARED and layer_of(imported) > layer_of(module):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_models_do_not_know_which_backend_computes_them() -> None:
    for path in (PACKAGE / "models").glob("*.py"):
        text = path.read_text("utf-8")
        assert "native" not in text, path
        assert "portable" not in text, path
