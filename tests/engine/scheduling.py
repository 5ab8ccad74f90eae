"""What tests of the scheduler share: requests, and how much of which prompts enters in a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import ChunkSizes
from glm_multiuser.engine.step import Step
from tests.engine.driving import Asked


def new_request(user: object = None, length: int = 1, group: str = "") -> Request:
    return Asked([1] * length, user, group=group).request


def rest_of(request: Request) -> int:
    """Tokens of its prompt that are not in."""
    return len(request.prompt_token_ids) - request.computed_tokens


def whole(most: int) -> ChunkSizes:
    """Prompts of one length enter together, up to so many, as in a graph of their own."""

    def chunk_sizes(prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        lengths = [len(request.prompt_token_ids) for request in prompts[:most]]
        return list(itertools.takewhile(lambda length: length == lengths[0], lengths))

    return chunk_sizes


def cut(room: int) -> ChunkSizes:
    """Tokens of prompts that a step takes, of all users together."""

    def chunk_sizes(prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        counts: list[int] = []
        for request in prompts:
            counts.append(min(rest_of(request), room - sum(counts)))
            if sum(counts) == room:
                break
        return counts

    return chunk_sizes


def slowly(steps: int) -> ChunkSizes:
    """One whole prompt after the other, each of which is on its way for some steps."""
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
    """What the engine writes down of a step that was run."""
    for request in step.returning.values():
        request.saved_past = None
    for piece in step.prompts.values():
        piece.request.computed_tokens += piece.tokens
    for request in step.decodes.values():
        request.computed_tokens += 1
