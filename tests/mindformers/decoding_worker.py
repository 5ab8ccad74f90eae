"""Runs as a child process, on the MindFormers that PYTHONPATH leads to.

A job comes as JSON on standard input, its result goes to `result.json`.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    faulthandler.dump_traceback_later(job.pop("deadline"), exit=True)
    import mindformers

    assert Path(mindformers.__file__).is_relative_to(job.pop("tree")), mindformers.__file__
    task = job.pop("task")
    # what tests a patched model imports names that an unpatched one does not have
    module = "worker_stress" if task == "hardship" else "worker_tasks"
    result: Any = getattr(import_module(f"tests.mindformers.{module}"), task)(**job)
    Path("result.json").write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
