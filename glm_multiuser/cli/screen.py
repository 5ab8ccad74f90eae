"""What every command writes to: answers and tables to stdout, progress and errors to stderr."""

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
    """Results. Made anew for each use, because tests exchange sys.stdout under it. Without markup,
    because names of folders may have brackets."""
    return Console(highlight=False, markup=False)


def wide_output(width: int) -> Console:
    """Results in a wide table; a pipe has no width that would have to be kept."""
    console = output()
    return console if console.is_terminal else Console(highlight=False, markup=False, width=width)


def print_numbers(console: Console, table: Table) -> None:
    """Prints a table without cutting a cell: where it is too wide for the terminal, in several
    parts, one below the other, each with the first column. Its headings and cells are strings."""
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
    """Cells on the terminal: the widest line, and the border and blanks beside it."""
    lines = (line for text in (column.header, *column.cells) for line in str(text).split("\n"))
    return max(map(cell_len, lines)) + 3


def messages() -> Console:
    """Everything that is not a result, so that stdout can be piped into the next program."""
    return Console(stderr=True, highlight=False, markup=False)


def print_error(error: BaseException) -> None:
    """One red line; a message of several lines keeps only its first."""
    lines = str(error).splitlines() or [type(error).__name__]
    messages().print(Text(f"error: {lines[0]}", style="bold red"), soft_wrap=True)


def notice(text: str) -> None:
    """One line on stderr, for steps that take longer than a moment."""
    messages().print(Text(text, style="dim"), soft_wrap=True)


def progress_bar() -> Progress:
    """A bar on stderr; it draws nothing when stderr is not a terminal."""
    console = messages()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def check_writable(path: Optional[Path]) -> None:
    """Opens a file that is written later, and leaves it as it is.

    Raises:
        ConfigError: it cannot be written.
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
    """The same for a picture.

    Raises:
        ConfigError: it cannot be written, or not in this format.
    """
    if path.suffix not in PICTURES:
        raise ConfigError(f"plot is {str(path)!r}; its name must end with {', '.join(PICTURES)}")
    check_writable(path)


def printable(text: str) -> str:
    """Text without control characters: what a model says must not steer anybody's terminal."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) != "Cc")
