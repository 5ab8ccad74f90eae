"""The scheduler under random event sequences, against a reference model of all rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import ChunkSizes
from glm_multiuser.engine.slots import Slots
from glm_multiuser.engine.step import PromptChunk, Step
from tests.engine.scheduling import (
    carry_out,
    cut,
    new_request,
    new_scheduler,
    rest_of,
    slowly,
    whole,
)

STEPS_ON_THE_WAY = 3


class Life(RuleBasedStateMachine):
    """Random event sequences, compared with a reference model.

    The model tracks arrivals, the last turn of each group, slot owners, the order of prompts, and
    since when slots are idle; it predicts the next step.
    """

    @initialize(
        count=st.integers(1, 4),
        chunk_sizes=st.one_of(
            st.builds(whole, st.integers(1, 3)),
            st.builds(cut, st.integers(1, 4)),
            st.builds(slowly, st.integers(2, STEPS_ON_THE_WAY)),
        ),
    )
    def begin(self, count: int, chunk_sizes: ChunkSizes) -> None:
        self.count = count
        self.chunk_sizes = chunk_sizes
        self.expected_take: tuple[list[Request], int, Sequence[int]] = ([], 0, [])
        self.scheduler = new_scheduler(count, self.take_as_expected)
        self.waiting: list[Request] = []
        self.time = 0
        self.turn_of: dict[str, int] = {}
        """When each waiting group started to wait, or had its last turn."""
        self.running: dict[int, Request] = {}
        self.turns: list[Request] = []
        """Requests with unfinished prefill, the next one first."""
        self.idle: list[tuple[object, int]] = []
        """(user, slot), the least recently used first."""
        self.accepted: set[Request] = set()
        self.ended: set[Request] = set()

    @rule(
        user=st.one_of(st.none(), st.integers(0, 5)),
        length=st.integers(1, 5),
        group=st.sampled_from("abc"),
    )
    def submit(self, user: Optional[int], length: int, group: str) -> None:
        request = new_request(user, length, group)
        self.waiting.append(request)
        self.count_turns()
        self.accepted.add(request)
        self.scheduler.waiting.append(request)

    @rule()
    def schedule(self) -> None:
        self.next_step()

    def next_step(self) -> Optional[Step]:
        """Runs one step, which must be the one that the model expects."""
        expected = self.expected_step()
        step = self.scheduler.schedule()
        if expected == Step():
            assert step is None
            return None
        assert step is not None
        assert step == expected
        assert list(step.prompts) == list(expected.prompts), "the order of the result rows"
        carry_out(step)
        return step

    def take_as_expected(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        """What the scheduler calls: `chunk_sizes` remembers, so it is asked once for each step."""
        turns, expected_decoding, counts = self.expected_take
        assert list(prompts) == turns
        assert decoding == expected_decoding
        return counts

    def expected_step(self) -> Step:
        """Also moves the model on to where it is when that step has been run."""
        returning = self.expected_admission()
        turns = [request for request in self.turns if request not in returning.values()]
        decodes = {
            slot: request
            for slot, request in self.running.items()
            if request not in self.turns and slot not in returning
        }
        counts = self.chunk_sizes(turns, len(decodes)) if turns else []
        self.expected_take = turns, len(decodes), counts
        slots = {request: slot for slot, request in self.running.items()}
        prompts = {slots[one]: PromptChunk(one, count) for one, count in zip(turns, counts)}
        for piece in (piece for piece in prompts.values() if piece.tokens):
            self.turns.remove(piece.request)
            if piece.tokens < rest_of(piece.request):
                self.turns.append(piece.request)
        return Step(prompts, decodes, returning)

    def count_turns(self, served: str = "") -> None:
        """Groups that begin to wait, or whose turn it was, stand behind the others from now on."""
        groups = {request.group: None for request in self.waiting}
        self.turn_of = {one: turn for one, turn in self.turn_of.items() if one in groups}
        for group in groups:
            if group not in self.turn_of or group == served:
                self.time += 1
                self.turn_of[group] = self.time

    def expected_next(self) -> Optional[Request]:
        """Who returns, else the first of the group with the fewest slots and the oldest turn."""
        busy = {one.user for one in self.running.values()}
        firsts: dict[str, Request] = {}
        for request in self.waiting:
            if request.user not in busy:
                firsts.setdefault(request.group, request)
        if not firsts or len(self.running) == self.count:
            return None
        groups = [one.group for one in self.running.values()]
        return min(
            firsts.values(),
            key=lambda one: (
                one.saved_past is None,
                groups.count(one.group),
                self.turn_of[one.group],
            ),
        )

    def expected_admission(self) -> dict[int, Request]:
        """Every request for which there is a slot, in order; -> those that return to the queue."""
        returning = {}
        while (request := self.expected_next()) is not None:
            slot = self.expected_slot(request.user)
            self.idle = [entry for entry in self.idle if entry[1] != slot]
            self.waiting.remove(request)
            self.count_turns(request.group)
            self.running[slot] = request
            if request.saved_past is not None:
                returning[slot] = request
            if rest_of(request) > 0:
                self.turns.append(request)
        return returning

    def expected_slot(self, user: object) -> int:
        own = [slot for owner, slot in self.idle if owner == user]
        idle = [slot for _, slot in self.idle]
        free = [slot for slot in range(self.count) if slot not in {*self.running, *idle}]
        return (own + free + idle)[0]

    def end(self, request: Request) -> None:
        self.ended.add(request)
        if request in self.turns:
            self.turns.remove(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running.pop(slot)
        self.end(request)
        if keep:
            self.idle.append((request.user, slot))
        assert self.scheduler.finish(slot, failed=not keep) is request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.count_turns()
        self.end(request)
        self.scheduler.waiting.remove(request)

    @rule(count=st.integers(1, 5))
    def resize(self, count: int) -> None:
        paused = sorted(self.running.items(), key=lambda item: item[1].number)
        for _, request in paused:
            request.saved_past = ()
        self.scheduler.pause(Slots(count))
        self.count = count
        self.waiting = [request for _, request in paused] + self.waiting
        self.count_turns()
        self.running, self.turns, self.idle = {}, [], []

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        here = [*self.scheduler.waiting, *self.scheduler.running.values()]
        assert len(here) == len(set(here))
        assert set(here) | self.ended == self.accepted
        assert not set(here) & self.ended

    @invariant()
    def waiting_requests_of_each_user_are_counted(self) -> None:
        users = [request.holder for request in self.waiting]
        for user in {*users, *range(6)}:
            assert self.scheduler.waiting.of_holder(user) == users.count(user)

    @invariant()
    def order_and_places_are_those_of_the_model(self) -> None:
        turns = sorted(self.waiting, key=lambda request: self.turn_of[request.group])
        assert list(self.scheduler.waiting) == turns
        assert self.scheduler.running == self.running

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        slots = self.scheduler.slots
        assert (slots.busy, slots.idle) == (len(self.running), len(self.idle))
        for owner, slot in self.idle:
            assert slots.slot_of(owner) == slot
        self.scheduler.check()

    @invariant()
    def no_user_runs_twice(self) -> None:
        users = [request.user for request in self.scheduler.running.values()]
        assert len(users) == len(set(users))

    def teardown(self) -> None:
        """Whatever happened before, every waiting request is scheduled; none starves."""
        if not hasattr(self, "scheduler"):
            return
        left = {*self.waiting, *self.running.values()}
        decoded = dict.fromkeys(left, 0)
        # One step to come back, one for each token of the prompt, two more tokens.
        patience = sum(STEPS_ON_THE_WAY + 1 + len(request.prompt_token_ids) + 2 for request in left)
        passed_over = dict.fromkeys(left, 0)
        while (step := self.next_step()) is not None:
            patience -= 1
            assert patience >= 0, "a request starves"
            for slot, request in list(self.running.items()):
                passed_over[request] = 0 if slot in step.requests else passed_over[request] + 1
                # As many turns as others have slots, and one in which it comes back.
                most = self.count * STEPS_ON_THE_WAY
                assert passed_over[request] <= most, "a request in a slot starves"
            for slot, request in step.decodes.items():
                decoded[request] += 1
                if decoded[request] == 2:
                    self.scheduler.finish(slot)
                    self.idle.append((request.user, slot))
                    self.end(self.running.pop(slot))
        assert set(decoded.values()) <= {2}


Life.TestCase.settings = settings(
    derandomize=True, max_examples=60, stateful_step_count=40, deadline=None
)
TestLife = Life.TestCase
