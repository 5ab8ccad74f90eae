"""Runs as a child process, on the MindFormers that PYTHONPATH leads to.

A job comes as JSON on standard input, its result goes to `result.json`.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    faulthandler.dump_traceback_later(job.pop("deadline"), exit=True)
    import mindformers

    assert Path(mindformers.__file__).is_relative_to(job.pop("tree")), mindformers.__file__
    from tests.mindformers.worker_stress import hardship
    from tests.mindformers.worker_tasks import everything, generate, other_ways, talk

    tasks = {task.__name__: task for task in (everything, generate, hardship, other_ways, talk)}
    result: Any = tasks[job.pop("task")](**job)
    Path("result.json").write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
