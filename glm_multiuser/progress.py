"""Progress of long operations: a progress bar or a callback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional

from glm_multiuser.errors import check_kind

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what)."""


@contextmanager
def show_progress(progress: Optional[Progress]) -> Iterator[Progress]:
    """Yields `progress` itself, or, for None, a progress bar on stderr if it is a terminal.

    Raises:
        InvalidParameterError: `progress` is not callable.
    """
    if progress is not None:
        yield check_kind("progress", progress, Callable)
        return
    if sys.stderr is None or not sys.stderr.isatty():  # None if it was closed
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    console = Console(stderr=True)
    # rich would print on stderr what other threads print on stdout, and Python may crash when
    # sys.stdout is replaced during a `print`.
    with Bar(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task("", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield report
