"""Builds an English and a Chinese notebook, with outputs, from each file in sources/.

    python examples/notebooks/build.py                  # all of them
    python examples/notebooks/build.py 02_many_users    # one

A source is a Python file of cells: `# %%` starts code, `# %% [markdown] lang="en"` and `lang="cn"`
start text, as comments. The cells of sources/where.py come second in every notebook. Code runs
once, so both languages have the same outputs.
"""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).resolve().parent
SOURCES = sorted((FOLDER / "sources").glob("[0-9]*.py"))
LANGUAGES = {"en": "", "cn": "_cn"}
MARK = re.compile(r'^# %%(?: \[markdown\] lang="(en|cn)")?\n', re.MULTILINE)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read_cells(source: Path, language: str) -> list[NotebookNode]:
    """The cells of a source in one language."""
    parts = MARK.split(source.read_text(encoding="utf-8"))[1:]
    cells = []
    for cell_language, text in zip(parts[::2], parts[1::2]):
        if cell_language is None:
            cells.append(new_code_cell(text.strip()))
        elif cell_language == language:
            text = re.sub("^# ?", "", text.strip(), flags=re.MULTILINE)
            cells.append(new_markdown_cell(text))
    return cells


def make_notebook(source: Path, language: str) -> NotebookNode:
    """The notebook of a source in one language, without outputs."""
    title, *rest = read_cells(source, language)
    cells = [title, *read_cells(FOLDER / "sources" / "where.py", language), *rest]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # nbformat's own ids are random: every build would differ
    return new_notebook(cells=cells, metadata=deepcopy(METADATA))


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Runs every code cell in `folder` with this Python, and stores the outputs.

    Raises:
        CellExecutionError: a cell raised.
    """
    own_python = KernelSpecManager(kernel_dirs=[])  # ignores installed kernels named python3
    with TemporaryDirectory() as sockets:  # sockets instead of ports open to other users
        kernel = AsyncKernelManager(
            kernel_spec_manager=own_python,
            transport="ipc",
            connection_file=f"{sockets}/kernel.json",
        )
        NotebookClient(
            notebook,
            km=kernel,
            timeout=600,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute(cleanup_kc=True)
    notebook.metadata = deepcopy(METADATA)  # the kernel adds the version of its Python


def main(names: list[str]) -> None:
    for source in SOURCES:
        if names and source.stem not in names:
            continue
        print(f"{source.stem}: executing ...", flush=True)
        executed = make_notebook(source, "en")
        execute(executed, FOLDER)
        outputs = [cell for cell in executed.cells if cell.cell_type == "code"]
        for language, ending in LANGUAGES.items():
            notebook = make_notebook(source, language)
            code = (cell for cell in notebook.cells if cell.cell_type == "code")
            for cell, done in zip(code, outputs):
                cell.outputs, cell.execution_count = done.outputs, done.execution_count
            nbformat.validate(notebook)
            path = FOLDER / f"{source.stem}{ending}.ipynb"
            nbformat.write(notebook, path)
            print(f"  {path.name}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
