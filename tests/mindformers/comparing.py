"""Holds what a child process told against what the original model computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.models.golden_cases import Case, worst

Told = dict[str, Any]


def answers_of(told: Sequence[Told]) -> list[list[int]]:
    """The token ids of answers; their text and their end have to fit."""
    for answer in told:
        assert answer["text"] == "".join(f"{token_id} " for token_id in answer["token_ids"])
        assert answer["ended"]
    return [answer["token_ids"] for answer in told]


def check(told: Sequence[Told], cases: Sequence[Case], numerics: str) -> None:
    """Compares answers, or beginnings of answers, and the logits they begin with.

    Raises:
        AssertionError: names every case that is off, and by how much.
    """
    assert len(told) == len(cases)
    answers = answers_of(told)
    assert all(answers)
    assert {case.name: answer for case, answer in zip(cases, answers)} == {
        case.name: case.greedy[numerics][: len(answer)] for case, answer in zip(cases, answers)
    }
    errors = {
        case.name: worst(np.array(answer["output"][0]), case.last_logits(numerics))
        for case, answer in zip(cases, told)
    }
    assert {
        case.name: errors[case.name] for case in cases if not errors[case.name] <= case.tolerance
    } == {}


def interleaved(order: Sequence[int]) -> bool:
    """Whether every answer was given while others were.

    Args:
        order: the number of the answer that each step belonged to.
    """
    spans = {
        answer: order[order.index(answer) : len(order) - order[::-1].index(answer)]
        for answer in set(order)
    }
    return all(set(span) != {answer} for answer, span in spans.items())
