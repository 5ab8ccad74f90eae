"""Work for threads of a pool, which also gets done when the pool takes none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable


def run_on(pool: ThreadPoolExecutor, function: Callable[[], object]) -> None:
    """Runs `function` once: on a thread of the pool, or here if the pool is shut down.

    All pools are shut down when the main thread has ended, while the program's other threads may
    still use an engine. A pool may also fail to start a thread, with the work already in its queue.
    """
    claim = threading.Lock()

    def once() -> None:
        if claim.acquire(blocking=False):
            function()

    try:
        pool.submit(once)
    except RuntimeError:
        once()
