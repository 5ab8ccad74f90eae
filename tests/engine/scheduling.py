"""Shared by scheduler tests: requests, and chunk sizes per step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import ChunkSizes, Scheduler
from glm_multiuser.engine.slot_sessions import SlotSessions
from glm_multiuser.engine.slots import Slots
from glm_multiuser.engine.step import Step
from glm_multiuser.sessions.store import SessionStore
from tests.engine.driving import Asked
from tests.engine.mock_runner import MockRunner


def new_request(user: object = None, length: int = 1, group: str = "") -> Request:
    return Asked([1] * length, user, group=group).request


def new_scheduler(slots: int, chunk_sizes: ChunkSizes) -> Scheduler:
    """A scheduler without a prefix cache, for sessions that are not kept."""
    sessions = SlotSessions(MockRunner(slots), SessionStore(), reuse=False)
    return Scheduler(Slots(slots), chunk_sizes, sessions)


def rest_of(request: Request) -> int:
    """Prompt tokens still to be computed."""
    return len(request.prompt_token_ids) - request.computed_tokens


def whole(most: int) -> ChunkSizes:
    """Up to `most` prompts of equal length per step, as in a prefill graph."""

    def chunk_sizes(prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        lengths = [len(request.prompt_token_ids) for request in prompts[:most]]
        return list(itertools.takewhile(lambda length: length == lengths[0], lengths))

    return chunk_sizes


def cut(room: int) -> ChunkSizes:
    """Up to `room` prompt tokens per step, of all users together."""

    def chunk_sizes(prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        counts: list[int] = []
        for request in prompts:
            counts.append(min(rest_of(request), room - sum(counts)))
            if sum(counts) == room:
                break
        return counts

    return chunk_sizes


def slowly(steps: int) -> ChunkSizes:
    """One whole prompt at a time, each over several steps."""
    on_the_way: list[Request] = []

    def chunk_sizes(prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        if on_the_way and on_the_way[0] is not prompts[0]:
            on_the_way.clear()
        on_the_way.append(prompts[0])
        if len(on_the_way) < steps:
            return [0]
        on_the_way.clear()
        return [rest_of(prompts[0])]

    return chunk_sizes


def carry_out(step: Step) -> None:
    """Updates the requests as the engine does after a step."""
    for request in step.returning.values():
        request.saved_past = None
    for piece in step.prompts.values():
        piece.request.computed_tokens += piece.tokens
    for request in step.decodes.values():
        request.computed_tokens += 1
