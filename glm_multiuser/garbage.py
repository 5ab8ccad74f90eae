"""Excludes long-lived objects from Python's garbage collection.

A full collection stops every thread. With many imports it takes tenths of a second in vain, because
imported objects are never freed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def leave_out_imports() -> None:
    """Excludes all current objects from garbage collection, for dedicated server processes. Call it
    before the first model is opened, so that closed models are collected. Does nothing if objects
    are already frozen."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """Excludes earlier objects from garbage collection inside the context, because MindSpore
    collects before it compiles a graph. Does nothing if the process has called `gc.freeze`
    itself."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
