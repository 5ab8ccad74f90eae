"""Streams concurrent answers on a terminal, in a grid of panes."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from typing import Optional

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from glm_multiuser.cli import screen
from glm_multiuser.cli.chat_answers import ChatAnswer, wall_seconds

NARROWEST_PANE = 26
LOWEST_PANE = 6
LINES_BELOW_PANES = 11
FRAMES_PER_SECOND = 12

UNBREAKABLE = re.compile(r"[⺀-￦][，。、；：？！”’）》]*|[^\s⺀-￦]+\s*|\s+")
"""A wide character with punctuation that must not start a line, or a word with its spaces."""


def show(
    console: Console, answers: Sequence[ChatAnswer], threads: Sequence[threading.Thread]
) -> None:
    """Draws the panes until all threads have ended."""
    with Live(
        frame(console, answers), console=console, auto_refresh=False, vertical_overflow="crop"
    ) as live:
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(1 / FRAMES_PER_SECOND)
            live.update(frame(console, answers), refresh=True)
        live.update(frame(console, answers), refresh=True)


def frame(console: Console, answers: Sequence[ChatAnswer]) -> Group:
    """Renders the panes that fit, and the number of users without one."""
    height = max(console.height - LINES_BELOW_PANES, LOWEST_PANE)
    columns, rows = grid_shape(len(answers), console.width, height)
    pane_height = min(height // rows, 18)
    shown = answers[: columns * rows]
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    pane_width = console.width // columns
    cells = [pane(answer, pane_width, pane_height) for answer in shown]
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    done = sum(answer.done for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = wall_seconds(answers)
    total = f"{done} of {len(answers)} users answered, {tokens} tokens"
    if seconds:
        total += f", {tokens / seconds:.0f} tok/s in all"
    if len(shown) < len(answers):
        total += f" ({len(answers) - len(shown)} users not shown: the window is too small)"
    return Group(grid, Text(total, style="bold"))


def grid_shape(count: int, width: int, height: int) -> tuple[int, int]:
    """Returns columns and rows of the grid: few empty cells first, then a readable pane shape."""
    most_columns = max(1, min(count, width // NARROWEST_PANE))
    most_rows = max(1, height // LOWEST_PANE)

    def cost(columns: int) -> tuple[int, float]:
        rows = min(math.ceil(count / columns), most_rows)
        # A character is about twice as high as wide: six times as many columns as lines look
        # three times as wide as high, which reads well.
        shape = (width / columns) / (height / rows) / 6
        return abs(count - columns * rows), abs(math.log(shape))

    columns = min(range(1, most_columns + 1), key=cost)
    return columns, min(math.ceil(count / columns), most_rows)


def pane(answer: ChatAnswer, width: int, height: int) -> Panel:
    """Renders the question, and the end of the answer that fits."""
    inner_width, inner_height = max(width - 4, 2), max(height - 2, 2)
    question = wrap(answer.question, inner_width)[: inner_height // 2]
    body = wrap(answer.error or answer.text, inner_width)[len(question) - inner_height :]
    failed = answer.error is not None
    return Panel(
        Text("\n").join(
            [
                *(Text(line, style="bold cyan") for line in question),
                *(Text(line, style="red" if failed else "") for line in body),
            ]
        ),
        title=Text(answer.user + (" ✗" if failed else " ✓" if answer.done else "")),
        title_align="left",
        subtitle=Text(status(answer)),
        subtitle_align="right",
        height=height,
        border_style="red" if failed else "green" if answer.done else "yellow",
    )


def wrap(text: str, width: int) -> list[str]:
    """Wraps text to lines of at most `width` cells. Chinese may break after every character, while
    rich only breaks at spaces."""
    lines = []
    for paragraph in screen.printable(text).expandtabs(4).split("\n"):
        line = ""
        for unit in UNBREAKABLE.findall(paragraph):
            for part in chop_cells(unit, width):
                if cell_len(line + part.rstrip()) > width:
                    lines.append(line.rstrip())
                    line = ""
                line += part
        lines.append(line.rstrip())
    return lines


def status(answer: ChatAnswer) -> str:
    """Returns tokens, speed, and how the answer ended."""
    if answer.error is not None:
        return "failed"
    if not answer.token_ids:
        return "waiting" if not answer.done else "done, no tokens"
    ending: Optional[str] = {"length": ", cut at --max-tokens"}.get(answer.finish_reason or "")
    return f"{len(answer.token_ids)} tokens, {answer.tokens_per_second:.0f} tok/s{ending or ''}"
