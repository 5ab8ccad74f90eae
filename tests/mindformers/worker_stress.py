"""In the child: one model under load, its lock, and what goes wrong in one stream of many."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

from tests.mindformers.worker_model import make_model
from tests.mindformers.worker_streams import Answer, JoinedIds, Pace, Prompt, Streams
from tests.mindformers.worker_text import streamed


def hardship(
    folder: str,
    prompts: Sequence[Prompt],
    users: int,
    threads: int,
    rounds: int,
    text: dict[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """Everything on one model, the load last; and `text`, the arguments of `streamed`."""
    streams = Streams(make_model(folder, users=users, **settings))
    return {
        "refused": refused(streams, prompts[0]),
        "failing": one_stream_fails(streams, prompts[:users]),
        "lock": when_held(streams, prompts[:2]),
        "load": load(streams, prompts, users, threads, rounds),
        "text": streamed(**text),
    }


def refused(streams: Streams, prompt: Prompt) -> dict[str, str]:
    """What `_stream_chat` says to arguments that cannot be right."""
    model, (token_ids, _) = streams.model, prompt
    length, seq_length = len(token_ids), model.config.seq_length
    too_long = [5] * (seq_length - length) + list(token_ids)
    right = {"origin_inputs": token_ids, "max_length": length + 1, "tokenizer": JoinedIds()}
    wrong: dict[str, dict[str, Any]] = {
        "user too high": {"qi": model.config.users},
        "user too low": {"qi": -1},
        "no tokenizer": {"tokenizer": None},
        "no room": {"max_length": length},
        "no room in the model": {"origin_inputs": too_long, "max_length": 2 * seq_length},
    }
    said = {}
    for name, arguments in wrong.items():
        stream = model._stream_chat(
            **{**right, **arguments},
            top_k=1,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=model.config.vocab_size,
        )
        try:
            next(stream)
        except ValueError as error:
            said[name] = str(error)
    return said


class OutOfWords(Exception):
    """What the failing tokenizer raises."""


class ThreeWords(JoinedIds):
    """A tokenizer that fails at the fourth token of an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def decode(self, token_ids: Sequence[int]) -> str:
        if len(self._answer.token_ids) > len(self._answer.prompt) + 3:
            raise OutOfWords
        return super().decode(token_ids)


def one_stream_fails(streams: Streams, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """User 0 of many fails in the middle, and afterwards answers again."""
    answers = [Answer(prompt) for prompt in prompts]
    again = Answer(prompts[0])
    pace = Pace(len(prompts), late=1)

    def talk(user: int) -> None:
        with pace.of(user):
            tokenizer = ThreeWords(answers[user]) if user == 0 else None
            for _ in streams.stream(answers[user], user, tokenizer):
                pace.step(user)

    errors = in_threads(talk, len(prompts))
    for _ in streams.stream(again, 0):
        pass
    return {
        "errors": [type(error).__name__ if error else None for error in errors],
        "answers": [answer.told() for answer in answers],
        "again": again.told(),
    }


def in_threads(talk: Callable[[int], None], threads: int) -> list[Optional[BaseException]]:
    with ThreadPoolExecutor(threads) as pool:
        return [one.exception() for one in [pool.submit(talk, user) for user in range(threads)]]


class KnownHolder:
    """A lock that knows which thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Optional[int] = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *error: Any) -> None:
        self._holder = None
        self._lock.release()

    @property
    def mine(self) -> bool:
        return self._holder == threading.get_ident()


def when_held(streams: Streams, prompts: Sequence[Prompt]) -> dict[str, list[bool]]:
    """Whether a thread held the lock, each time it ran a graph, read a piece or made text."""
    lock = KnownHolder()
    held: dict[str, list[bool]] = {"graph": [], "piece": [], "text": []}
    plain = type(streams.model)

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            held["graph"].append(lock.mine)
            return super().__call__(*args, **kwargs)

    class Watching(JoinedIds):
        def decode(self, token_ids: Sequence[int]) -> str:
            held["text"].append(lock.mine)
            return super().decode(token_ids)

    pace = Pace(len(prompts), late=1)

    def talk(user: int) -> None:
        with pace.of(user):
            for _ in streams.stream(Answer(prompts[user]), user, Watching(), tlock=lock):
                held["piece"].append(lock.mine)
                pace.step(user)

    streams.model.__class__ = Watched
    errors = in_threads(talk, len(prompts))
    streams.model.__class__ = plain
    assert errors == [None] * len(prompts), errors
    return held


def load(
    streams: Streams, prompts: Sequence[Prompt], users: int, threads: int, rounds: int
) -> list[dict[str, Any]]:
    """More threads than users, each of which answers again and again and often breaks off."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for user in range(users):
        free.put(user)
    crowd = Crowd()
    told: list[dict[str, Any]] = []

    def talk(thread: int) -> None:
        chance = random.Random(thread)
        for _ in range(rounds):
            number = chance.randrange(len(prompts))
            prompt, most = prompts[number]
            count = chance.randint(1, most)
            read = chance.randint(0, count) if chance.random() < 0.5 else count
            answer = Answer((prompt, count))
            user = free.get()
            crowd.wait_for_tokens(chance.randrange(12))
            with crowd:
                pieces = streams.stream(answer, user)
                for _ in range(read):
                    next(pieces)
                    crowd.count_token()
                if read < count:
                    pieces.close()
                else:
                    assert next(pieces, None) is None
            free.put(user)
            told.append(
                {
                    "prompt": number,
                    "count": count,
                    "read": read,
                    "token_ids": answer.token_ids[len(prompt) :],
                    "ended": answer.ended,
                }
            )

    errors = in_threads(talk, threads)
    assert errors == [None] * threads, errors
    return told


class Crowd:
    """All who answer at the moment, and the tokens they got."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answering = 0
        self._tokens = 0

    def __enter__(self) -> None:
        self._change(answering=1)

    def __exit__(self, *error: Any) -> None:
        self._change(answering=-1)

    def count_token(self) -> None:
        self._change(tokens=1)

    def wait_for_tokens(self, count: int) -> None:
        """Waits until others have got so many more, or no request is running."""
        with self._changed:
            goal = self._tokens + count
            self._changed.wait_for(lambda: self._tokens >= goal or self._answering == 0)

    def _change(self, answering: int = 0, tokens: int = 0) -> None:
        with self._changed:
            self._answering += answering
            self._tokens += tokens
            self._changed.notify_all()
