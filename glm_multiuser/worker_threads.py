"""Work on other threads: of a pool, also when it takes none, and with a large stack."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, TypeVar

Result = TypeVar("Result")

LARGE_STACK_BYTES = 256 << 20
"""Reserved, and allocated as far as it is used. llguidance takes 8 KB for each level of a schema,
also through references, and a schema may have some thousand levels; usual stacks have 8 MB."""
_stack_size = threading.Lock()


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


def on_large_stack(function: Callable[[], Result]) -> Result:
    """Returns what `function` returns, or raises what it raises, on a thread of its own."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="large-stack")
    with _stack_size:  # it is a setting of the process
        before = threading.stack_size(LARGE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()
