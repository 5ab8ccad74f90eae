"""Converts the fields of a question to a request, and its answer to the next history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from pydantic import TypeAdapter, ValidationError

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.server.bodies import (
    ROUNDS_MAX,
    History,
    HistoryItem,
    as_history,
    problem_of,
    with_round,
)
from glm_multiuser.server.generation_request import GenerationRequest, sampling_of
from glm_multiuser.server.kserve.fields import Fields
from glm_multiuser.server.kserve.signature import Element
from glm_multiuser.tokenizers import rounds_of

HISTORY: TypeAdapter[list[HistoryItem]] = TypeAdapter(History)
SHOWN_LENGTH = 60


@dataclass(frozen=True)
class Question:
    """A question with its history.

    Attributes:
        prompt: its text.
        history: all earlier rounds, including those that `history_len` omits.
        request: to the model.
    """

    prompt: str
    history: list[HistoryItem]
    request: GenerationRequest

    def history_with(self, answer: str) -> str:
        """Returns the history with this round appended, as JSON text for the next request."""
        return HISTORY.dump_json(with_round(self.history, self.prompt, answer)).decode()


def rows_of(tensors: Mapping[str, Sequence[Element]]) -> Iterator[dict[str, Element]]:
    """Yields the inputs of each question of a batch; an empty text counts as a missing tensor."""
    for elements in zip(*tensors.values()):
        row = dict(zip(tensors, elements))
        yield {name: one for name, one in row.items() if one != "" or name == "prompt"}


def fields_of(given: Mapping[str, Any]) -> Fields:
    """Validates the fields of a question.

    Raises:
        InvalidParameterError: an invalid value.
    """
    try:
        return Fields.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, message = problem_of(first, first["loc"])
        raise InvalidParameterError(message, field) from None


def question_of(fields: Fields, defaults: SamplingParams) -> Question:
    """Returns the question with its request to the model.

    Args:
        fields: of the question.
        defaults: the checkpoint's sampling parameters.

    Raises:
        InvalidParameterError: an invalid field.
    """
    prompt = fields.text_input if fields.prompt is None else fields.prompt
    if prompt is None or (fields.prompt is not None and fields.text_input is not None):
        raise InvalidParameterError("prompt or text_input must be given, one of them", "prompt")
    history = _read_history(fields.history or "")
    counted = _last_rounds(as_history(history), fields.history_len)
    params = sampling_of(defaults, **fields.sampling())
    return Question(prompt, history, GenerationRequest(prompt, counted, params=params))


def _read_history(text: str) -> list[HistoryItem]:
    if not text.strip():
        return []
    try:
        return HISTORY.validate_json(text)
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        problem = first["msg"]
        if first["loc"]:
            problem = f"item {first['loc'][0]} is no [question, answer] pair and no message"
        raise InvalidParameterError(
            f"history is {text[:SHOWN_LENGTH]!r}: {problem}; it must be JSON, "
            f'[["question", "answer"], ...], with at most {ROUNDS_MAX} items',
            field="history",
        ) from None


def _last_rounds(items: list[Any], count: Optional[int]) -> list[Any]:
    """Returns the last `count` rounds, always with the system message."""
    if count is None:
        return items
    system, rounds = rounds_of(items)
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *rounds[max(0, len(rounds) - count) :]]
