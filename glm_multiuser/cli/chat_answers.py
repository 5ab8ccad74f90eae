"""Runs concurrent users, each in a thread, and the same requests alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.sampling_params import SamplingParams


@dataclass
class ChatAnswer:
    """One user's question and the answer so far; one thread writes, any may read."""

    user: str
    question: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: Optional[str] = None
    error: Optional[str] = None
    asked_at: Optional[float] = None
    first_token_at: Optional[float] = None
    last_token_at: Optional[float] = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def first_token_seconds(self) -> Optional[float]:
        if self.asked_at is None or self.first_token_at is None:
            return None
        return self.first_token_at - self.asked_at

    @property
    def tokens_per_second(self) -> float:
        """Rate from the request to the latest token, including queueing and prefill."""
        if self.asked_at is None or self.last_token_at is None:
            return 0.0
        return len(self.token_ids) / max(self.last_token_at - self.asked_at, 1e-9)


def stream_answer(llm: MultiUserLLM, answer: ChatAnswer, params: SamplingParams) -> None:
    """Streams the answer to one question; an error is stored in the answer, not raised."""
    answer.asked_at = time.perf_counter()
    try:
        for piece in llm.stream_chat(answer.question, user=answer.user, params=params):
            if piece.token_ids:
                answer.last_token_at = time.perf_counter()
                if answer.first_token_at is None:
                    answer.first_token_at = answer.last_token_at
                answer.token_ids.extend(piece.token_ids)
            answer.text += piece.text
            answer.finish_reason = piece.finish_reason
    except Exception as error:  # one user's failure belongs in that user's pane
        answer.error = f"{type(error).__name__}: {error}"


def start_chats(
    llm: MultiUserLLM, answers: Sequence[ChatAnswer], params: SamplingParams
) -> list[threading.Thread]:
    """Starts one thread per answer; join them to wait for all answers."""
    threads = [
        threading.Thread(
            target=stream_answer, args=(llm, answer, params), name=answer.user, daemon=True
        )
        for answer in answers
    ]
    for thread in threads:
        thread.start()
    return threads


def chat_together(
    llm: MultiUserLLM, answers: Sequence[ChatAnswer], params: SamplingParams
) -> Sequence[ChatAnswer]:
    """Runs all questions concurrently; returns when every answer is complete."""
    for thread in start_chats(llm, answers, params):
        thread.join()
    return answers


def chat_alone(llm: MultiUserLLM, together: ChatAnswer, params: SamplingParams) -> ChatAnswer:
    """Repeats a user's question while no other request runs."""
    alone = ChatAnswer(together.user, together.question)
    stream_answer(llm, alone, params)
    return alone


def same(first: ChatAnswer, second: ChatAnswer) -> bool:
    """Whether both are complete, with the same tokens."""
    return (
        first.finish_reason in ("stop", "length")
        and first.finish_reason == second.finish_reason
        and first.token_ids == second.token_ids
    )


def wall_seconds(answers: Sequence[ChatAnswer]) -> float:
    """Returns the time from the first question to the last token."""
    asked = [answer.asked_at for answer in answers if answer.asked_at is not None]
    ended = [answer.last_token_at for answer in answers if answer.last_token_at is not None]
    return max(ended) - min(asked) if asked and ended else 0.0
