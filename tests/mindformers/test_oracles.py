"""Patched MindFormers computes what the original model does, for many users at once.

Two ways to compute the rotary embedding are known from the original: in float32, as the patches
make MindFormers do, and with the tables of its half-precision form, which is what MindFormers has
had all along. No case is left out: masks and positions of MindFormers are those of the original
for every prompt there is, also with special tokens in odd places.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.mindformers.children import Children
from tests.mindformers.comparing import check, interleaved
from tests.mindformers.wheels import VERSIONS, make_tree
from tests.models.golden_cases import Case, Reference, read_reference

pytestmark = [pytest.mark.slow, pytest.mark.rare]

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
CHOICES = {"fp32": "whole", "rope16": "half rotary tables"}

JOBS = [
    # folder, version, numerics, tokens of an answer: each graph of 28 layers compiles for 13 s,
    # and the first token takes one graph, all others together a second.
    ("chatglm_6b_28layers", NEWEST, "fp32", 4),
    ("chatglm_6b_28layers", OLDEST, "rope16", 1),
    ("chatglm_6b_3layers", NEWEST, "rope16", 48),
    # test_every_version.py has 3 layers with fp32. So every two of version, depth and numerics
    # meet somewhere.
]


def cases_of(reference: Reference) -> list[Case]:
    return reference.short + reference.long


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Any, Future[Any]]]:
    """One child process for each job that a test is selected for, two at a time."""
    selected: list[Any] = [
        item.callspec.params["job"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    folder = tmp_path_factory.mktemp("oracles")
    children = Children(folder)
    told = {}
    for job in selected:
        name, version, numerics, count = job
        tree = folder / f"{version} {CHOICES[numerics]}"
        if not tree.exists():
            make_tree(folder, request.config.cache, version, CHOICES[numerics])
        reference = read_reference(name)
        told[job] = children.start(
            tree,
            "talk",
            folder=str(reference.folder),
            prompts=[
                (case.token_ids, min(count, len(case.greedy[numerics])))
                for case in cases_of(reference)
            ],
            users=4,
            late=1,
            seq_length=640,
        )
    yield told
    children.close()


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_logits_and_greedy_tokens(
    told: dict[Any, Future[Any]], job: tuple[str, str, str, int]
) -> None:
    name, _, numerics, count = job
    found = told[job].result()
    check(found["answers"], cases_of(read_reference(name)), numerics)
    assert len(set(found["order"])) == len(found["answers"])
    assert count == 1 or interleaved(found["order"])
