"""Patched MindFormers under load, and what goes wrong in one stream of many."""

from __future__ import annotations

import pytest

from tests.mindformers.children import CHECKOUT, Children
from tests.mindformers.comparing import Told, check
from tests.mindformers.wheels import VERSIONS, make_tree
from tests.models.golden_cases import Reference, read_reference

pytestmark = pytest.mark.slow

USERS, THREADS, ROUNDS = 6, 8, 12
NEW = 12

GLM_TINY = CHECKOUT / "ckpt" / "glm-tiny"
TEXT = "你好😀，\n世界🎉！"
CUT = 4
"""Tokens after which a smiling face still lacks a half."""


@pytest.fixture(scope="module")
def three() -> Reference:
    return read_reference("chatglm_6b_3layers")


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, three: Reference
) -> Told:
    folder = tmp_path_factory.mktemp("stress")
    tree = make_tree(folder, request.config.cache, VERSIONS[-1], "whole")
    children = Children(folder)
    told: Told = children.start(
        tree,
        "hardship",
        folder=str(three.folder),
        prompts=[(case.token_ids, NEW) for case in three.short],
        users=USERS,
        threads=THREADS,
        rounds=ROUNDS,
        seq_length=128,
        text={"folder": str(GLM_TINY), "text": TEXT, "cut": CUT},
    ).result()
    children.close()
    return told


def test_no_wrong_token_under_load(told: Told, three: Reference) -> None:
    """Threads wait for users, answer at random lengths, and break off at random places."""
    answers = told["load"]
    assert len(answers) == THREADS * ROUNDS
    for answer in answers:
        expected = three.short[answer["prompt"]].greedy["fp32"]
        assert answer["token_ids"] == expected[: answer["read"]]
        assert answer["ended"] == (answer["read"] > 0)  # a stream that never began has no end
    broken_off = [answer for answer in answers if answer["read"] < answer["count"]]
    assert 0 < len(broken_off) < len(answers)


def test_the_lock_is_held_for_graphs_and_nothing_else(told: Told) -> None:
    assert told["lock"]["graph"] == [True] * 2 * NEW
    assert told["lock"]["piece"] == [False] * 2 * NEW
    assert set(told["lock"]["text"]) == {False}


def test_a_stream_that_fails_ends_alone(told: Told, three: Reference) -> None:
    failing = told["failing"]
    assert failing["errors"] == ["OutOfWords"] + [None] * (USERS - 1)
    first, *others = failing["answers"]
    assert first["text"] == "".join(f"{token_id} " for token_id in first["token_ids"][:3])
    assert first["token_ids"] == three.short[0].greedy["fp32"][:4]
    assert first["ended"]
    check([failing["again"], *others], three.short[:USERS], "fp32")


def test_arguments_that_cannot_be_right(told: Told) -> None:
    assert told["refused"] == {
        "user too high": f"user is {USERS}, the users of this model are 0 to {USERS - 1}.",
        "user too low": f"user is -1, the users of this model are 0 to {USERS - 1}.",
        "no tokenizer": "tokenizer is None, it is needed to make text of token ids.",
        "no room": "the prompt has 3 tokens, max_length is 3.",
        "no room in the model": "the prompt has 128 tokens, max_length is 128.",
    }


def test_text_comes_in_whole_characters(told: Told) -> None:
    """MindFormers' own tokenizer has several tokens for a character that it does not know."""
    text = told["text"]
    assert "".join(text["pieces"]) == TEXT
    assert "\ufffd" not in "".join(text["pieces"])
    assert len(text["pieces"]) < text["tokens"]
    assert [grown for grown, _ in text["random"]] == [whole for _, whole in text["random"]]
    *pieces, rest = text["cut pieces"]
    assert pieces == ["你", "好"]
    assert set(rest) == {"\ufffd"}
