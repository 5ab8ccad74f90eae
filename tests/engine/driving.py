"""Requests, their receivers, and an engine stepped by the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable, Sequence
from typing import Any, Callable, Optional

from glm_multiuser.device_thread import DeviceThread, Stepper
from glm_multiuser.engine.engine import Engine
from glm_multiuser.engine.request import End, Event, Request, Token
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.sessions.store import SessionStore
from tests.engine.mock_runner import EOS, SEQ_LENGTH, VOCAB, Call, MockRunner

LONG: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Answers of maximum length."""

PATIENCE = 180.0
"""Timeout in seconds for tests that would hang; shared machines may stall for most of a
minute."""


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns as soon as the condition holds.

    Raises:
        AssertionError: it did not hold within `seconds`.
    """
    waiting = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        waiting.wait(0.005)
    raise AssertionError("what the test waits for did not happen")


class Asked:
    """A request and all its events."""

    def __init__(
        self,
        prompt: Sequence[int],
        user: Hashable = None,
        when: Optional[Callable[[Event], None]] = None,
        group: str = "",
        **params: Any,
    ) -> None:
        self.tokens: list[Token] = []
        self.end: Optional[End] = None
        self._when = when
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.request = Request(
            prompt,
            SamplingParams(**params),
            object() if user is None else user,
            (EOS,),
            SEQ_LENGTH - len(prompt),
            VOCAB,
            self._deliver,
            group,
        )

    def _deliver(self, event: Event) -> None:
        """Runs on the device thread."""
        if self._when is not None:
            self._when(event)
        self._events.put(event)

    def next_event(self) -> Event:
        """Waits for the next event."""
        assert self.end is None, "the request has ended already"
        event = self._events.get(timeout=PATIENCE)
        if isinstance(event, End):
            self.end = event
        else:
            self.tokens.append(event)
        return event

    def wait(self) -> Asked:
        """Waits for the end."""
        while self.end is None:
            self.next_event()
        assert self._events.empty(), "something came after the end"
        return self

    def look(self) -> Asked:
        """Reads the available events without waiting."""
        while not self._events.empty():
            self.next_event()
        return self

    @property
    def token_ids(self) -> list[int]:
        return [token.choice.token_id for token in self.tokens]

    @property
    def reason(self) -> str:
        assert self.end is not None
        return self.end.finish_reason

    @property
    def error(self) -> str:
        """The error that ended the request, as text."""
        assert self.end is not None
        assert self.reason == "error"
        return f"{type(self.end.error).__name__}: {self.end.error}"


class ByHand(DeviceThread):
    """A device thread without a thread: the test runs every step itself."""

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def attach(self, stepper: Stepper) -> None:
        self._steppers += (stepper,)


def hand_engine(
    users: int,
    before: Callable[[Call], None] = lambda call: None,
    max_queue: int = 1000,
    max_queue_per_user: int = 1000,
    most_prompts: int = 1,
    chunk: Optional[int] = None,
    runner_class: type[MockRunner] = MockRunner,
    cache_limit: Optional[int] = None,
    store: Optional[SessionStore] = None,
) -> tuple[Engine, MockRunner]:
    """An engine that runs only when its `step` is called; with `chunk`, a causal model."""
    runner = runner_class(users, before, most_prompts, chunk)
    limits = max_queue, max_queue_per_user
    reuse = chunk is not None
    return Engine(runner, users, *limits, ByHand(), reuse, cache_limit, store), runner


def run(engine: Engine, *asked: Asked) -> None:
    """Submits the requests and steps until the engine is idle."""
    for one in asked:
        engine.submit(one.request)
    finish(engine)
    for one in asked:
        one.wait()


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def alone(prompt: Sequence[int], **params: Any) -> Asked:
    """The answer to a request alone in a fresh engine."""
    engine, _ = hand_engine(1)
    asked = Asked(prompt, **params)
    run(engine, asked)
    return asked


def steps_of(engine: Engine, count: int) -> None:
    for _ in range(count):
        assert engine.step()


def engine_with_work(before: Callable[[Call], None]) -> tuple[Engine, MockRunner, list[Asked]]:
    """Two slots, two running requests, one waiting."""
    engine, runner = hand_engine(2, before)
    asked = [Asked([n], max_tokens=8, **LONG) for n in (1, 2, 3)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, 4)
    return engine, runner, asked


def threaded_engine(
    thread: DeviceThread, users: int, before: Callable[[Call], None], max_queue: int = 100
) -> tuple[Engine, MockRunner]:
    runner = MockRunner(users, before)
    return Engine(runner, users, max_queue, 100, thread), runner


def in_background(function: Callable[[], Any]) -> Callable[[], Any]:
    """Runs `function` in its own thread; returns a function that waits for its result or error."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((function(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body, daemon=True)  # a test that fails can end
    thread.start()

    def join() -> Any:
        thread.join(PATIENCE)
        assert outcome, "the call did not return"
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return join


class FailOnce:
    """A device that fails in the first call of a kind, or in a call with a certain request."""

    def __init__(self, kind: str, asked: Any = None) -> None:
        self.kind, self.asked, self.failed = kind, asked, False

    def __call__(self, call: Call) -> None:
        wanted = self.asked is None or self.asked.request in call.requests.values()
        if call.kind == self.kind and wanted and not self.failed:
            self.failed = True
            raise RuntimeError("the device broke")
