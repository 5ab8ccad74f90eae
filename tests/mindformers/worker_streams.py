"""In the child: answers, given alone or by several threads whose steps alternate."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import numpy as np
from mindformers import GLMChatModel

Prompt = tuple[Sequence[int], int]
"""Token ids, and how many to answer."""

GREEDY = {"top_k": 1, "top_p": 1.0, "repetition_penalty": 1.0}


class JoinedIds:
    """A tokenizer whose text tells the token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


class Answer:
    """One answer while it is given, and the streamer that MindFormers tells about it."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.count = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.ended = False
        self.first_output: Any = None
        """What the graph returned for the prompt's last token."""

    def put(self, token_ids: Any) -> None:
        self.token_ids += np.ravel(token_ids).tolist()

    def end(self) -> None:
        self.ended = True

    def told(self) -> dict[str, Any]:
        """For the parent process."""
        length = len(self.prompt)
        assert self.token_ids[:length] == list(self.prompt)
        return {
            "token_ids": self.token_ids[length:],
            "text": self.text,
            "ended": self.ended,
            "output": [output.tolist() for output in self.first_output],
        }


class Streams:
    """A model, with a look at what each of its graphs returns.

    Attributes:
        order: the answer that each graph call was for, in the order in which they ended.
    """

    def __init__(self, model: GLMChatModel) -> None:
        self.model = model
        self.order: list[Answer] = []
        self._of_user: dict[int, Answer] = {}
        self._infer = model._incremental_infer
        model._incremental_infer = self._observed_infer

    def _observed_infer(self, *args: Any, **kwargs: Any) -> Any:
        result = self._infer(*args, **kwargs)
        if "user" not in kwargs:  # MindFormers' own `generate`
            return result
        answer = self._of_user[int(kwargs["user"])]
        self.order.append(answer)
        if answer.first_output is None:
            # The plain model returns logits of every position, the accelerated one of the last.
            last = len(answer.prompt) - 1 if len(result) == 1 else 0
            answer.first_output = [output.asnumpy()[last] for output in result]
        return result

    def stream(
        self, answer: Answer, user: int, tokenizer: Optional[Any] = None, **settings: Any
    ) -> Generator[str, None, None]:
        """Answers without a stop at an end token, by default greedily; a piece for each token."""
        self._of_user[user] = answer
        pieces = self.model._stream_chat(
            [answer.prompt],
            max_length=len(answer.prompt) + answer.count,
            eos_token_id=self.model.config.vocab_size,
            streamer=answer,
            tokenizer=tokenizer or JoinedIds(),
            qi=user,
            **{**GREEDY, **settings},
        )
        for piece in pieces:
            answer.text += piece
            yield piece

    def alone(self, prompts: Sequence[Prompt], users: int) -> list[Answer]:
        """One answer after the other, by each user in turn."""
        answers = [Answer(prompt) for prompt in prompts]
        for number, answer in enumerate(answers):
            for _ in self.stream(answer, number % users):
                pass
        return answers

    def together(
        self,
        prompts: Sequence[Prompt],
        users: int,
        late: int = 3,
        sampling: Optional[dict[str, Any]] = None,
    ) -> list[Answer]:
        """A thread for each user, who answers every so manieth prompt, one after the other.

        Args:
            late: see `Pace`.
            sampling: settings other than greedy ones; the seed is then the number of the prompt.
        """
        answers = [Answer(prompt) for prompt in prompts]
        pace = Pace(users, late)

        def talk(user: int) -> None:
            with pace.of(user):
                for number in range(user, len(answers), users):
                    settings = {**sampling, "seed": number} if sampling else {}
                    for _ in self.stream(answers[number], user, **settings):
                        pace.step(user)

        with ThreadPoolExecutor(users) as threads:
            for talking in [threads.submit(talk, user) for user in range(users)]:
                talking.result()
        return answers


class Pace:
    """Lets threads start one after the other, and then none get two tokens ahead of another.

    So every answer is given while others are under way, on any machine. Which of the threads comes
    first with a token is still up to chance.

    Args:
        users: the threads.
        late: a user starts when the one before has got so many tokens.
    """

    def __init__(self, users: int, late: int) -> None:
        self._changed = threading.Condition()
        self._late = late
        self._to_come = list(range(users))
        self._tokens: dict[int, int] = {}
        """Of the users that have started; a late one gets what the others have."""
        self._own_tokens = [0] * users
        self._start_next()

    def of(self, user: int) -> Turn:
        return Turn(self, user)

    def enter(self, user: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: user in self._tokens)

    def step(self, user: int) -> None:
        with self._changed:
            self._tokens[user] += 1
            self._own_tokens[user] += 1
            if self._own_tokens[user] == self._late:
                self._start_next()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._tokens[user] <= min(self._tokens.values()) + 1)

    def leave(self, user: int) -> None:
        with self._changed:
            if self._own_tokens[user] < self._late:
                self._start_next()  # a failure must not keep the next one waiting
            del self._tokens[user]
            self._changed.notify_all()

    def _start_next(self) -> None:
        if self._to_come:
            self._tokens[self._to_come.pop(0)] = min(self._tokens.values(), default=0)


class Turn:
    """One user's part of a `Pace`, from its start to its end."""

    def __init__(self, pace: Pace, user: int) -> None:
        self._pace = pace
        self._user = user

    def __enter__(self) -> None:
        self._pace.enter(self._user)

    def __exit__(self, *error: Any) -> None:
        self._pace.leave(self._user)
