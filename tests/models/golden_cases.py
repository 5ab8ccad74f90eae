"""What the original code computed, and how close an answer has to come to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.golden_data import golden_folder
from tests.models.driven_model import DrivenModel, Stream

TOLERANCES = {
    "chatglm_6b_3layers": 5e-4,
    "chatglm_6b_28layers": 1e-4,
    "chatglm3_6b": 2e-4,
    "glm4": 2e-4,
    "glm4_0414": 2e-4,
    "llama": 2e-4,
    "llama_tied": 2e-4,
    "qwen2": 3e-4,
    "qwen2_tied": 3e-4,
    "qwen2_yarn": 2e-4,
    "qwen3": 2e-4,
    "qwen3_tied": 2e-4,
}
"""For the logits of a short prompt's last token; for a long one's twice as much."""

CAUSAL = tuple(name for name in TOLERANCES if not name.startswith("chatglm_6b"))

STEP_TOLERANCE = 1e-3
"""For logits of decode steps, where the original differs from itself by up to 1.2e-4."""


@dataclass(frozen=True, eq=False)
class Case:
    """One prompt and what the original code makes of it.

    Attributes:
        greedy: numerics ("fp32", "rope16", "alpha28") -> the answer.
        arrays: see tests/golden/README.md.
        tolerance: of the logits of the prompt's last token.
    """

    name: str
    token_ids: list[int]
    greedy: dict[str, list[int]]
    arrays: dict[str, np.ndarray] = field(repr=False)
    tolerance: float

    def last_logits(self, numerics: str) -> np.ndarray:
        return self._array(numerics, "last_logits")

    def has_step_logits(self, numerics: str) -> bool:
        return f"{numerics}/step_logits" in self.arrays or "step_logits" in self.arrays

    def step_logits(self, numerics: str) -> np.ndarray:
        """[tokens of the answer, vocab_size]; row 0 are the last logits of the prompt."""
        return self._array(numerics, "step_logits")

    def _array(self, numerics: str, what: str) -> np.ndarray:
        # Long prompts have arrays without the name of the numerics.
        name = f"{numerics}/{what}"
        return self.arrays[name if name in self.arrays else what]


class Reference(NamedTuple):
    folder: Path
    short: list[Case]
    long: list[Case]


def read_reference(name: str) -> Reference:
    tolerance = TOLERANCES[name]
    folder = golden_folder(name, "expected.npz", "expected_long.npz", "model.safetensors")
    return Reference(
        folder,
        _read_cases(folder, "expected", tolerance),
        _read_cases(folder, "expected_long", 2 * tolerance),
    )


def _read_cases(folder: Path, stem: str, tolerance: float) -> list[Case]:
    cases = json.loads((folder / f"{stem}.json").read_text("utf-8"))["cases"]
    with np.load(folder / f"{stem}.npz") as file:
        arrays = dict(file)
    read = []
    for case in cases:
        own = f"{case['index']}/"
        greedy = {"fp32": case["greedy"]}
        for numerics in ("rope16", "alpha28"):
            if f"greedy_{numerics}" in case:
                greedy[numerics] = case[f"greedy_{numerics}"]
        of_case = {name[len(own) :]: arrays[name] for name in arrays if name.startswith(own)}
        read.append(Case(case["name"], case["input_ids"], greedy, of_case, tolerance))
    return read


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


def check_answer(
    case: Case, token_ids: Sequence[int], rows: Sequence[np.ndarray], numerics: str = "fp32"
) -> None:
    """Compares a whole answer, and the logits that each of its tokens came from."""
    assert worst(rows[0], case.last_logits(numerics)) <= case.tolerance, case.name
    assert token_ids == case.greedy[numerics], case.name
    if case.has_step_logits(numerics):
        expected = case.step_logits(numerics)
        assert worst(np.stack(rows[: len(expected)]), expected) <= STEP_TOLERANCE, case.name


def check(answers: Sequence[tuple[Case, Stream]], numerics: str = "fp32") -> None:
    """Compares answers, or beginnings of answers, with the reference.

    Raises:
        AssertionError: names every case that is off, and by how much.
    """
    assert {case.name: stream.answer for case, stream in answers} == {
        case.name: case.greedy[numerics][: len(stream.answer)] for case, stream in answers
    }
    off = {}
    for case, stream in answers:
        error = worst(stream.logits[0], case.last_logits(numerics))
        if not error <= case.tolerance:
            off[case.name, "last"] = error
        if case.has_step_logits(numerics):
            expected = case.step_logits(numerics)[: len(stream.logits)]
            error = worst(np.stack(stream.logits), expected)
            if not error <= STEP_TOLERANCE:
                off[case.name, "step"] = error
    assert not off


def check_together(
    model: DrivenModel, cases: Sequence[Case], lengths: Sequence[int], numerics: str = "fp32"
) -> None:
    """Answers all cases, as many at once as there are users, decoded by one graph.

    Args:
        lengths: what prompts are padded to.
    """
    answers: list[tuple[Case, Stream]] = []
    waves = -(-len(cases) // model.layout.users)
    for first in range(waves):
        wave = cases[first::waves]
        counts = [len(case.greedy[numerics]) for case in wave]
        end = max(len(case.token_ids) + count for case, count in zip(wave, counts))
        blocks = 1 if end <= model.layout.block_lengths[0] else len(model.layout.block_lengths)
        padded = [next(one for one in lengths if one >= len(case.token_ids)) for case in wave]
        prompts = [case.token_ids for case in wave]
        answers += zip(wave, model.answer_together(prompts, counts, padded, blocks))
    assert len(answers) == len(cases)
    check(answers, numerics)


def check_alone(model: DrivenModel, cases: Sequence[Case], count: int, padded: int) -> None:
    """Answers each case by `count` tokens, through graphs for one user that a Tensor names."""
    answers = []
    for number, case in enumerate(cases):
        user = (3 * number + 1) % model.layout.users
        answers.append((case, model.answer_alone(user, case.token_ids, count, padded, 1)))
    check(answers)


def with_step_logits(cases: Sequence[Case]) -> list[Case]:
    found = [case for case in cases if case.has_step_logits("fp32")]
    assert found
    return found
