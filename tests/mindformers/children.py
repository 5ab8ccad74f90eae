"""Starts the processes in which a MindFormers is imported and decodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]

DEADLINE = 600
"""Seconds until a child is taken to hang. It then prints the stacks of all its threads."""


class Children:
    """Runs jobs, two at a time, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(2)
        self._number = 0

    def start(self, tree: Path, task: str, **job: Any) -> Future[Any]:
        """Lets a task of `decoding_worker.py` run on the MindFormers in `tree`.

        Args:
            task: its name.
            job: its arguments, as JSON can hold them.

        Returns:
            what it returned; an AssertionError with its last words, if it failed.
        """
        self._number += 1
        folder = self._folder / f"child {self._number}"
        folder.mkdir()
        job.update(tree=str(tree), task=task, deadline=DEADLINE)
        return self._threads.submit(_run, folder, tree, job)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _run(folder: Path, tree: Path, job: dict[str, Any]) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mindformers.decoding_worker"],
        cwd=folder,  # MindFormers writes log files to where it is started
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(CHECKOUT)))},
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=DEADLINE + 20,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    return json.loads((folder / "result.json").read_text("utf-8"))
