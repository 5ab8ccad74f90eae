"""The notebooks run top to bottom, and what is committed is what their sources make."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WITHOUT = "`pip install -e '.[dev]'` brings what runs notebooks"
nbformat = pytest.importorskip("nbformat", reason=WITHOUT)
pytest.importorskip("nbclient", reason=WITHOUT)
pytest.importorskip("ipykernel", reason=WITHOUT)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
SOURCES = sorted((FOLDER / "sources").glob("[0-9]*.py"))
ENDINGS = {"en": "", "cn": "_cn"}
LARGEST = 300_000

every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
every_language = pytest.mark.parametrize("language", ENDINGS)


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """examples/notebooks/build.py."""
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What of a clone the notebooks look at; what they and IPython write stays in here."""
    import matplotlib.font_manager  # noqa: F401 - where it has no cache yet, building it is reported

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "ckpt").symlink_to(ROOT / "ckpt")
    (tmp_path / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")
    shutil.copytree(FOLDER, tmp_path / "examples" / "notebooks")
    return tmp_path


def committed(source: Path, language: str) -> Any:
    path = FOLDER / f"{source.stem}{ENDINGS[language]}.ipynb"
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of_outputs(notebook: Any) -> list[list[str]]:
    """Of every code cell: what it shows, without what differs from run to run."""
    return [
        [output.get("name") or "/".join(sorted(output.data)) for output in cell.outputs]
        for cell in code_cells(notebook)
    ]


def test_there_are_three_notebooks_in_two_languages() -> None:
    assert [source.stem for source in SOURCES] == [
        "01_quick_start",
        "02_many_users",
        "03_measuring_a_card",
    ]
    assert {path.name for path in FOLDER.glob("*.ipynb")} == {
        f"{source.stem}{ending}.ipynb" for source in SOURCES for ending in ENDINGS.values()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        # What the third one runs is `glm-multiuser bench`, with its own tests.
        pytest.param(source, marks=pytest.mark.rare if source.stem.startswith("03") else ())
        for source in SOURCES
    ],
    ids=lambda source: source.stem,
)
def test_a_notebook_runs_top_to_bottom(build: ModuleType, clone: Path, source: Path) -> None:
    notebook = committed(source, "en")
    shown = kinds_of_outputs(notebook)
    for cell in code_cells(notebook):
        cell.outputs = []
    build.execute(notebook, clone / "examples" / "notebooks")
    assert kinds_of_outputs(notebook) == shown


@every_language
@every_source
def test_a_notebook_is_what_its_source_makes(
    build: ModuleType, source: Path, language: str
) -> None:
    made, there = build.make_notebook(source, language), committed(source, language)
    assert [(cell.id, cell.cell_type, cell.source) for cell in made.cells] == [
        (cell.id, cell.cell_type, cell.source) for cell in there.cells
    ]
    assert made.metadata == there.metadata


@every_source
def test_both_languages_have_the_same_code_and_outputs(source: Path) -> None:
    english, chinese = committed(source, "en"), committed(source, "cn")
    assert code_cells(english) == code_cells(chinese)
    texts = [[cell.source for cell in one.cells] for one in (english, chinese)]
    assert len(texts[0]) == len(texts[1])
    assert texts[0] != texts[1]


@every_language
@every_source
def test_outputs_are_tidy(source: Path, language: str) -> None:
    notebook = committed(source, language)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in [output for cell in cells for output in cell.outputs]:
        assert output.output_type in ("stream", "display_data")
        assert output.get("name") != "stderr"
    text = nbformat.writes(notebook)
    assert not re.search(r"Warning|WARNING|\\u001b|/(?:home|root|work|tmp|usr|opt|mnt)/", text)
    assert len(text.encode("utf-8")) < LARGEST


@every_language
@every_source
def test_links_lead_somewhere(source: Path, language: str) -> None:
    cells = [cell for cell in committed(source, language).cells if cell.cell_type == "markdown"]
    links = [link for cell in cells for link in re.findall(r"\]\(([^)]+)\)", cell.source)]
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []
