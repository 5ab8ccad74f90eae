"""Work on other threads: of a pool, also when it takes none, and with a large stack."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, TypeVar

from glm_multiuser.errors import GLMMultiUserError

Result = TypeVar("Result")

LARGE_STACKS = (256 << 20, 64 << 20, 16 << 20)
"""Bytes: reserved, and allocated as far as they are used. llguidance takes 8 KB for each level of a
schema, also through references, and a schema may have some thousand levels; usual stacks have 8 MB.
The smaller ones are for systems that limit reserved memory."""
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
    """Returns what `function` returns, or raises what it raises, on a thread of its own.

    Raises:
        GLMMultiUserError: the system starts no such thread.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    _start_with_large_stack(run).join()
    if errors:
        raise errors.pop()
    return results.pop()


def _start_with_large_stack(run: Callable[[], None]) -> threading.Thread:
    refused = RuntimeError()
    for size in LARGE_STACKS:
        thread = threading.Thread(target=run, name="large-stack")
        with _stack_size:  # it is a setting of the process
            before = threading.stack_size(size)
            try:
                thread.start()
                return thread
            except RuntimeError as error:
                refused = error
            finally:
                threading.stack_size(before)
    raise GLMMultiUserError(f"no thread with a stack of {LARGE_STACKS[-1] >> 20} MB: {refused}")
