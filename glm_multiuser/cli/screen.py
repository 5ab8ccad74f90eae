"""Output of all commands: answers and tables to stdout, progress and errors to stderr."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Optional

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from glm_multiuser.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def output() -> Console:
    """Returns the console for results. Created for each use, because tests replace sys.stdout.
    Without markup, because folder names may contain brackets."""
    return Console(highlight=False, markup=False)


def wide_output(width: int) -> Console:
    """Returns the console for a wide table, which a pipe does not limit."""
    console = output()
    return console if console.is_terminal else Console(highlight=False, markup=False, width=width)


def print_numbers(console: Console, table: Table) -> None:
    """Prints a table of strings without truncating cells. If it is too wide for the terminal, it is
    split into parts below each other, each with the first column."""
    parts, used = [[0]], 0
    widths = [column_width(column) for column in table.columns]
    for index in range(1, len(widths)):
        used += widths[index]
        if len(parts[-1]) > 1 and widths[0] + used + 1 > console.width:
            parts.append([0])
            used = widths[index]
        parts[-1].append(index)
    for number, part in enumerate(parts):
        columns = [table.columns[index] for index in part]
        shown = Table(title=None if number else table.title)
        for column in columns:
            shown.add_column(column.header, justify=column.justify, no_wrap=True)
        for row in zip(*(column.cells for column in columns)):
            shown.add_row(*row)
        console.print(shown)


def column_width(column: Column) -> int:
    """Returns the width in terminal cells: the widest line, plus border and padding."""
    lines = (line for text in (column.header, *column.cells) for line in str(text).split("\n"))
    return max(map(cell_len, lines)) + 3


def messages() -> Console:
    """Returns the console for everything but results, so that stdout can be piped."""
    return Console(stderr=True, highlight=False, markup=False)


def print_error(error: BaseException) -> None:
    """Prints the first line of the message in red."""
    lines = str(error).splitlines() or [type(error).__name__]
    messages().print(Text(f"error: {lines[0]}", style="bold red"), soft_wrap=True)


def notice(text: str) -> None:
    """Prints one line to stderr, before a slow step."""
    messages().print(Text(text, style="dim"), soft_wrap=True)


def progress_bar(shown: bool = True) -> Progress:
    """Returns a progress bar on stderr, invisible unless `shown` and stderr is a terminal."""
    console = messages()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # rich would print it on stderr
        disable=not (shown and console.is_terminal),
    )


def check_writable(path: Optional[Path]) -> None:
    """Checks that a file can be written later, without changing it.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def check_picture(path: Path) -> None:
    """Like `check_writable`, for an image.

    Raises:
        ConfigError: the file cannot be written, or its format is not supported.
    """
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"plot is {str(path)!r}; its name must end with {', '.join(PICTURES)}")
    check_writable(path)


def printable(text: str) -> str:
    """Removes control characters, so that a model cannot control the user's terminal."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) != "Cc")
