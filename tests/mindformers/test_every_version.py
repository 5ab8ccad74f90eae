"""Every MindFormers with a GLM, patched by git: many users in threads answer as each alone.

The prompts are those of `tests/golden/chatglm_6b_3layers`. Tokens are compared with what the
original model answers; and with what the same version answers without the patches, by its own
`generate`, greedily and sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.mindformers.children import Children
from tests.mindformers.comparing import Told, answers_of, check, interleaved
from tests.mindformers.wheels import ALL_VERSIONS, CHOICES, PATCHES, VERSIONS, make_tree
from tests.models.golden_cases import Case, Reference, read_reference

pytestmark = pytest.mark.slow

USERS = 4
SHORT = 160
"""What the model's caches hold, enough for all prompts but the long ones."""

SAMPLING = {"top_k": 50, "top_p": 0.95, "temperature": 2.5, "repetition_penalty": 1.1}


class Version(NamedTuple):
    """What the child processes told about a version; `Future`, so that they run side by side."""

    reference: Reference
    cases: list[Case]
    few: list[Case]
    whole: Future[Any]


class Plain(NamedTuple):
    """What they told about a version with upstream's numbers, for one user and for many."""

    unpatched: Future[Any]
    users_only: Future[Any]


@pytest.fixture(scope="module")
def three() -> Reference:
    return read_reference("chatglm_6b_3layers")


NEWEST = VERSIONS[-1]
OLDEST_AND_NEWEST = (VERSIONS[0], NEWEST)


def rare_but(newest: str, versions: Sequence[str]) -> list[Any]:
    """What stands for an older version does not change any more, nor do its patches."""
    rare = pytest.mark.rare
    return [one if one == newest else pytest.param(one, marks=rare) for one in versions]


@pytest.fixture(scope="module", params=rare_but(NEWEST, VERSIONS))
def version(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, three: Reference
) -> Iterator[Version]:
    number = request.param
    folder = tmp_path_factory.mktemp("version")
    children = Children(folder)
    # Between the newest and the oldest only the ways to call a model differ, not what it computes.
    newest = number == NEWEST
    cases = three.short + three.long if newest else three.short
    few = cases[::3]
    whole = children.start(
        make_tree(folder, request.config.cache, number, "whole"),
        "everything",
        folder=str(three.folder),
        prompts=prompts_of(cases, 48 if number in OLDEST_AND_NEWEST else 16),
        few=prompts_of(few, 8),
        users=USERS,
        seq_length=640 if newest else SHORT,
    )
    yield Version(three, cases, few, whole)
    children.close()


@pytest.fixture(scope="module", params=ALL_VERSIONS)
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, three: Reference
) -> Iterator[Plain]:
    folder = tmp_path_factory.mktemp("plain")
    children = Children(folder)
    prompts = prompts_of(three.short[: 3 * USERS], 16)

    def start(choice: str, task: str, **job: Any) -> Future[Any]:
        tree = make_tree(folder, request.config.cache, request.param, choice)
        job.update(folder=str(three.folder), prompts=prompts, seq_length=SHORT, sampling=SAMPLING)
        return children.start(tree, task, **job)

    yield Plain(
        start("unpatched", "generate_and_sample"),
        start("users only", "talk_and_sample", users=USERS),
    )
    children.close()


def prompts_of(cases: Sequence[Case], count: int) -> list[tuple[list[int], int]]:
    return [(case.token_ids, min(count, len(case.greedy["fp32"]))) for case in cases]


def test_the_versions_are_those_with_patches() -> None:
    assert sorted(f"mindformers-{number}" for number in VERSIONS) == sorted(
        folder.name for folder in PATCHES.iterdir() if folder.is_dir()
    )


@pytest.mark.parametrize("number", VERSIONS)
def test_the_patches_of_every_choice_apply_without_the_others(
    number: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for choice in CHOICES:
        make_tree(tmp_path, request.config.cache, number, choice)


@pytest.mark.rare
def test_many_users_get_the_tokens_of_the_unpatched_model(plain: Plain) -> None:
    for how, expected in plain.unpatched.result().items():
        told = plain.users_only.result()[how]
        assert answers_of(told["answers"]) == expected, how
        assert interleaved(told["order"])
        assert told["graphs"] == 2  # for all users
    assert plain.unpatched.result()["greedy"] != plain.unpatched.result()["sampled"]


def test_many_users_get_what_the_original_model_answers(version: Version) -> None:
    told = version.whole.result()["together"]
    check(told["answers"], version.cases, "fp32")
    assert interleaved(told["order"])
    assert told["graphs"] == 2


def test_alone_and_together_no_bit_differs(version: Version) -> None:
    together = dict(zip(names(version.cases), version.whole.result()["together"]["answers"]))
    for name, alone in zip(names(version.few), version.whole.result()["alone"]):
        assert alone["token_ids"] == together[name]["token_ids"][:8], name
        assert alone["output"] == together[name]["output"], name


def names(cases: Sequence[Case]) -> list[str]:
    return [case.name for case in cases]


def test_nan_in_a_past_does_not_survive(version: Version) -> None:
    told = version.whole.result()["nan"]
    assert set(told["planted"]) == {1.0}
    assert set(told["left"]) == {0.0}
    check(told["answers"], version.few[:2], "fp32")


def test_generate_of_the_patched_model(version: Version) -> None:
    assert version.whole.result()["generated"] == [case.greedy["fp32"][:8] for case in version.few]


def test_sample_acceleration_returns_the_softmax(version: Version) -> None:
    told = version.whole.result()["accelerated"]
    assert answers_of(told) == [case.greedy["fp32"][:8] for case in version.few]
    for answer, case in zip(told, version.few):
        probabilities, token_ids = map(np.array, answer["output"])
        logits = case.last_logits("fp32").astype(np.float64)
        softmax = np.exp(logits - logits.max())
        softmax /= softmax.sum()
        assert probabilities.sum() == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(probabilities, softmax[token_ids], atol=1e-4)
        assert sorted(token_ids) == list(range(len(logits)))


@pytest.fixture(scope="module")
def newest(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, three: Reference
) -> Told:
    """What the other two ways to make a model of the newest version answer."""
    folder: Path = tmp_path_factory.mktemp("newest")
    tree = make_tree(folder, request.config.cache, VERSIONS[-1], "whole")
    children = Children(folder)
    told: Told = children.start(
        tree,
        "other_ways",
        folder=str(three.folder),
        prompts=prompts_of(three.short[:6], 6),
        users=2,
        seq_length=48,
    ).result()
    children.close()
    return told


@pytest.mark.rare
def test_a_graph_for_each_user(newest: Told, three: Reference) -> None:
    check(newest["graph per user"]["answers"], three.short[:6], "fp32")
    assert interleaved(newest["graph per user"]["order"])
    assert newest["graph per user"]["graphs"] == 4


@pytest.mark.rare
def test_without_a_past(newest: Told, three: Reference) -> None:
    assert newest["no past"] == [case.greedy["fp32"][:6] for case in three.short[:6]]
