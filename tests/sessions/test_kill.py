"""`kill -9` between turns, and a new process on the same folder."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sessions.talking import all_alone

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A process of `worker.py`."""

    def __init__(self, folder: Path, slots: int) -> None:
        command = [sys.executable, "-m", "tests.sessions.worker", str(folder), str(slots)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def ask(self, talks: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(talks) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def after_kills(folder: Path, users: int, slots: int, turns: int) -> tuple[Any, list[int]]:
    """Each turn in its own process -> everybody's answers, and cached tokens of later turns."""
    histories: dict[int, list[int]] = {number: [] for number in range(users)}
    answers: dict[int, list[Any]] = {number: [] for number in range(users)}
    cached: list[int] = []
    for turn in range(turns):
        order = random.Random(turn).sample(range(users), users)
        worker = Worker(folder, slots)
        try:
            for number, history, answer, held in worker.ask(
                [(number, histories[number], turn) for number in order]
            ):
                histories[number] = history
                answers[number].append(answer)
                cached += [held] if turn else []
        finally:
            worker.kill()
    return answers, cached


def as_json(answers: Any) -> Any:
    return json.loads(json.dumps(list(answers.values())))


def test_a_killed_process_has_written_what_is_idle(tmp_path: Path) -> None:
    answers, cached = after_kills(tmp_path, users=8, slots=3, turns=2)
    assert as_json(answers) == as_json(all_alone(range(8), 2))
    assert min(cached) > 0


@pytest.mark.rare
def test_three_hundred_users_and_kills(tmp_path: Path) -> None:
    answers, cached = after_kills(tmp_path, users=300, slots=8, turns=3)
    assert as_json(answers) == as_json(all_alone(range(300), 3))
    assert sum(held > 0 for held in cached) >= 0.95 * len(cached)
