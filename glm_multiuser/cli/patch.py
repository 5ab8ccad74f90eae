"""`glm-multiuser patch`: applies the patches for MindFormers' own GLM to its files."""

import difflib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Optional

import typer
from rich.table import Table
from rich.text import Text

from glm_multiuser.cli import screen
from glm_multiuser.cli.interrupts import raised
from glm_multiuser.errors import ConfigError
from glm_multiuser.mindformers.series import Series, read_all_series
from glm_multiuser.mindformers.tree import EARLIER, TouchedFile, Tree, open_tree
from glm_multiuser.mindformers.writing import patch_tree, revert_tree

STYLES = {"pristine": "", "patched": "green", "partly patched": "yellow", EARLIER: "yellow"}


def command(
    show: Annotated[bool, typer.Option("--list", help="List all patches.")] = False,
    check: Annotated[
        Optional[Path], typer.Option(metavar="PATH", help="Show what --apply would do.")
    ] = None,
    apply: Annotated[
        Optional[Path], typer.Option(metavar="PATH", help="Apply all patches.")
    ] = None,
    revert: Annotated[
        Optional[Path], typer.Option(metavar="PATH", help="Revert all patches.")
    ] = None,
) -> None:
    """Patch MindFormers' own GLM for many users, or revert the patches.

    PATH is an unpacked wheel, a checkout, site-packages, or the folder `mindformers` itself; its
    version is detected from file contents. A file with other changes is rejected; patches of an
    earlier series are replaced by --apply, and reverted by --revert.
    Either all files are written or none, and every action can be repeated.
    """
    if [show, check is not None, apply is not None, revert is not None].count(True) != 1:
        raise ConfigError(
            "give exactly one of --list, --check PATH, --apply PATH and --revert PATH"
        )
    known = read_all_series()
    if show:
        print_series(known)
    elif check is not None:
        print_check(open_tree(check, known))
    elif apply is not None:
        tree = open_tree(apply, known)
        with raised():
            written = patch_tree(tree)
        print_done(tree, written, "patched")
    elif revert is not None:
        tree = open_tree(revert, known)
        with raised():
            written = revert_tree(tree)
        print_done(tree, written, "pristine")


def print_series(known: Sequence[Series]) -> None:
    """Prints all patches of all versions."""
    table = Table()
    table.add_column("MindFormers", no_wrap=True)
    table.add_column("#", justify="right")
    table.add_column("patch", overflow="fold")
    table.add_column("files", overflow="fold")
    for series in known:
        version = ", ".join(series.versions)
        for patch in series.patches:
            files = "\n".join(PurePosixPath(change.path).name for change in patch.changes)
            table.add_row(version, *patch.title.split(" ", 1), files)
            version = ""
        table.add_section()
    screen.output().print(table)


def print_check(tree: Tree) -> None:
    """Prints the state of a tree, and the changes that patching would make in each file."""
    say(f"{heading(tree)} is {tree.state}", STYLES[tree.state])
    for file in tree.files:
        say(f"\n{file.path}: {what_to_do(file)}", "bold")
        for change in file.changes[file.done :]:
            say(f"  {change.title}")


def what_to_do(file: TouchedFile) -> str:
    """Describes the changes that patching would make in one file."""
    if file.state == "patched":
        return "all patches are applied"
    added, removed = changed_lines(file.content, file.patched())
    done = f", {file.done} of {len(file.changes)} patches are applied" if file.done else ""
    earlier = ", in place of the earlier series" if file.earlier else ""
    return f"+{added} -{removed} lines{done}{earlier}"


def print_done(tree: Tree, written: Sequence[str], state: str) -> None:
    """Prints the result of --apply or --revert."""
    if not written:
        say(f"{heading(tree)} is {state} already; nothing was written")
        return
    say(f"{heading(tree)} is now {state}; these files were written:", "green")
    for path in written:
        say(f"  {path}")


def heading(tree: Tree) -> str:
    return f"MindFormers {tree.version} at {tree.root}"


def say(text: str, style: str = "") -> None:
    """Prints one line without wrapping, so that paths can be copied."""
    screen.output().print(Text(text, style), soft_wrap=True)


def changed_lines(before: bytes, after: bytes) -> tuple[int, int]:
    """Returns the numbers of added and removed lines."""
    pieces = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    changes = [piece for piece in pieces.get_opcodes() if piece[0] != "equal"]
    return sum(piece[4] - piece[3] for piece in changes), sum(p[2] - p[1] for p in changes)
