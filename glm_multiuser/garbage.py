"""What Python's garbage collections look through.

A collection of all objects stops every thread. Where much is imported it takes tenths of a second,
and finds nothing: what was imported stays.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def leave_out_imports() -> None:
    """For a process that serves and does nothing else: collections look through what is made from
    now on. To be called before the first model is opened; a model that is closed is to be
    collected. Changes nothing where something is left out already."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """Inside, collections leave out objects that were there before. MindSpore collects before it
    compiles a graph, in whatever process imports this library; if that one has called `gc.freeze`
    itself, nothing changes."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
