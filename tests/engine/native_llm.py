"""Small random models with native kernels, and helpers for their engines."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser import MultiUserLLM
from glm_multiuser.backends.native.pages import PagedArray
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.native import NativeRunner
from glm_multiuser.handle import Handle
from glm_multiuser.models.multi_user import MultiUserModel
from tests.engine.small_model import GREEDY, MODEL, PROMPTS, SEQ_LENGTH, Heard
from tests.poison import poison

PAGE = mmap.PAGESIZE


def open_llm(users: int, model: Any = MODEL, **settings: Any) -> MultiUserLLM:
    return MultiUserLLM.from_config(
        model,
        seed=1,
        **{"users": users, "seq_length": SEQ_LENGTH, "kernels": "native", **settings},
    )


def runner_of(llm: MultiUserLLM) -> NativeRunner:
    runner = llm._runner
    assert isinstance(runner, NativeRunner)
    return runner


def bits(heard: list[Heard]) -> list[Any]:
    return [one.bits for one in heard]


def moved(llm: MultiUserLLM, prompts: list[list[int]], steps: int, users: int) -> list[Handle]:
    """Requests that pause for a resize after `steps` steps."""

    def move() -> list[Handle]:
        handles = [llm.submit(one, params=GREEDY) for one in prompts]
        for _ in range(steps):
            assert llm._engine.step()
        llm._engine._resize(users, lambda *what: None)
        return handles

    handles: list[Handle] = DEVICE_THREAD.call(move)
    return handles


def poisoned(llm: MultiUserLLM, user: int) -> list[Handle]:
    """One request per user; when the first has two tokens, the whole cache of `user` becomes
    NaN."""

    def begin_and_poison() -> list[Handle]:
        handles = [llm.submit(one, params=GREEDY, user=user) for user, one in enumerate(PROMPTS)]
        while [slot.generated_tokens for slot in llm._engine.slots()] < [2, 0, 0]:
            llm._engine.step()
        slot = llm._engine._scheduler.slots.slot_of(user)
        assert slot is not None
        poison(runner_of(llm).model, slot)
        return handles

    handles: list[Handle] = DEVICE_THREAD.call(begin_and_poison)
    return handles


def poison_all(model: MultiUserModel) -> None:
    def fill() -> None:
        for slot in range(model.layout.users):
            poison(model, slot)

    DEVICE_THREAD.call(fill)


def in_pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return math.ceil(size / PAGE) * PAGE


def caches_of(llm: MultiUserLLM) -> Iterator[PagedArray]:
    for layer in runner_of(llm).model.layer_cells():
        for cell in layer.attend.kv_past:
            yield from (cell.keys, cell.values)


def resident_bytes(llm: MultiUserLLM) -> int:
    """Resident bytes of the caches, from mincore(2)."""

    def count() -> int:
        return sum(resident_pages(paged.array) for paged in caches_of(llm)) * PAGE

    resident: int = DEVICE_THREAD.call(count)
    return resident


def resident_pages(array: NDArray[Any]) -> int:
    found = (ctypes.c_ubyte * (array.nbytes // PAGE))()
    address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    assert ctypes.CDLL(None).mincore(address, size, found) == 0
    return int((np.frombuffer(bytes(found), np.uint8) & 1).sum())


def huge_bytes(array: NDArray[Any]) -> int:
    """Bytes in huge pages of the mapping that `array` lies in."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        word = line.split()[0]
        if "-" in word:
            start, end = (int(one, 16) for one in word.split("-"))
            inside = start <= array.ctypes.data < end
        elif inside and word == "AnonHugePages:":
            found = int(line.split()[1]) * 1024
    return found
