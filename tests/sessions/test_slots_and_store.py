"""Conversations of more users than slots: the same bits as alone, and what is kept is restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm_multiuser import EngineClosedError, MultiUserLLM, SessionError, UserBusyError
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.sessions.file import read_file
from glm_multiuser.sessions.session import CacheBytes
from tests.engine import small_model
from tests.engine.native_llm import open_llm, poison_all, runner_of
from tests.sessions.talking import GREEDY, LENGTH, MODEL, Conversation, all_alone, causal_llm

USERS = 6
TURNS = 3


@pytest.fixture(scope="module")
def expected() -> dict[int, list[Any]]:
    return all_alone(range(USERS), TURNS)


@pytest.fixture(params=["memory", "disk", "both", "disk of less than a session"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    disk = {"session_dir": str(tmp_path / "kept")}
    return {
        "memory": {"session_memory": "10MiB"},
        "disk": disk,
        "both": {"session_memory": "60KiB", **disk},
        "disk of less than a session": {"session_memory": "10MiB", "session_disk": "1KiB", **disk},
    }[request.param]


def test_more_users_than_slots(settings: dict[str, str], expected: dict[int, list[Any]]) -> None:
    talks = [Conversation(number, f"user {number}") for number in range(USERS)]
    with causal_llm(2, **settings) as llm:
        for turn in range(TURNS):
            for one in talks:
                held = len(one.history)
                # The last token of an answer has no keys and values yet.
                assert one.talk(llm) == max(0, held - 1), turn
        counts = llm.stats().sessions
        assert counts.restored == USERS * (TURNS - 1)
        assert llm.stats().compiles_after_ready == 0
    assert {one.number: one.answers for one in talks} == expected


def test_nothing_of_a_slot_is_read_behind_its_session(expected: dict[int, list[Any]]) -> None:
    with causal_llm(1, session_memory="10MiB") as llm:
        one, other = Conversation(0, "a"), Conversation(1, "b")
        one.talk(llm)
        for _ in range(TURNS - 1):
            other.talk(llm)
            poison_all(runner_of(llm).model)
            other_held = llm._engine._scheduler.slots.held("b")
            assert other_held
            llm.forget("b")  # its slot holds NaN now
            other.history, other.turn = [], 0
            assert one.talk(llm) > 0
    assert one.answers == expected[0]


def test_a_restart_and_another_number_of_slots(
    tmp_path: Path, expected: dict[int, list[Any]]
) -> None:
    talks = [Conversation(number, number) for number in range(3)]
    for users in (3, 1, 2):
        with causal_llm(users, session_dir=str(tmp_path)) as llm:
            for one in talks:
                assert (one.talk(llm) > 0) == (users != 3)
    assert all(one.answers == expected[one.number] for one in talks)


def test_a_resize_saves_the_idle(expected: dict[int, list[Any]]) -> None:
    one = Conversation(0, "a")
    with causal_llm(1, session_memory="10MiB") as llm:
        one.talk(llm)
        llm.resize(2)
        assert one.talk(llm) > 0
    assert one.answers == expected[0][:2]


def test_what_would_not_be_kept_is_not_copied_and_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with causal_llm(2, session_memory="1KiB") as llm:
        read: list[int] = []
        read_slot = runner_of(llm).read_slot

        def record(slot: int, positions: int) -> Iterator[CacheBytes]:
            read.append(slot)
            return read_slot(slot, positions)

        monkeypatch.setattr(runner_of(llm), "read_slot", record)
        for number in range(2):
            Conversation(number, number).talk(llm)
        llm.resize(1)
        assert not read
        Conversation(0, 0).talk(llm)
        llm.save_session(0, tmp_path / "file")
        assert len(read) == 1
        assert llm.stats().sessions.saved == 0


def test_a_question_asked_otherwise_starts_where_it_differs(expected: Any) -> None:
    with causal_llm(1, session_memory="10MiB") as llm:
        one, other = Conversation(0, "a"), Conversation(1, "b")
        one.talk(llm)
        one.talk(llm)
        other.talk(llm)
        one.history, one.turn = one.history[:18], 1  # the second question again
        assert one.talk(llm) == len(one.history) - 6
    assert one.answers[1] == one.answers[2] == expected[0][1]


def test_a_request_may_have_its_prompt_computed_whole(tmp_path: Path) -> None:
    from dataclasses import replace

    with causal_llm(1, session_dir=str(tmp_path)) as llm:
        one = Conversation(0, "a")
        one.talk(llm)
        Conversation(1, "b").talk(llm)
        params = replace(GREEDY, cache_prompt=False)
        assert llm.submit(one.question(), user="a", params=params).result().usage.cached_tokens == 0


def test_other_weights_settings_and_models_get_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"session_dir": str(tmp_path), "kernels": "native"}
    others: list[dict[str, Any]] = [
        {},
        {"cache_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16", "cache_dtype": "float32"},
        {"seed": 2},
    ]
    for other in others:
        one = Conversation(0, "a")
        one.history = [1, 2, 3]
        with MultiUserLLM.from_config(
            MODEL, **{"seed": 1, "users": 1, "seq_length": LENGTH, **settings, **other}
        ) as llm:
            assert one.talk(llm) == 0, other
    # All of them are kept, and all of them go.
    assert len(list(tmp_path.glob("*.session"))) == len(others)
    with causal_llm(1, session_dir=str(tmp_path)) as llm:
        llm.forget("a")
    assert not list(tmp_path.glob("*.session"))


def test_save_load_and_forget(tmp_path: Path, expected: dict[int, list[Any]]) -> None:
    path = tmp_path / "a.session"
    one = Conversation(0, "a")
    with causal_llm(1) as llm:
        with pytest.raises(SessionError, match="user 'a' has no session"):
            llm.save_session("a", path)
        one.talk(llm)
        llm.save_session("a", path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert [(info.user, info.place) for info in llm.sessions()] == [("a", "slot")]
        llm.forget("a")
        assert llm.sessions() == []
        llm.load_session("b", path)
        one.user = "b"
        assert one.talk(llm) > 0
        llm.forget("b")
        assert one.talk(llm) == 0
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(SessionError, match="damaged: it is cut short"):
            llm.load_session("b", path)
        with pytest.raises(SessionError, match="no session is read from"):
            llm.load_session("b", tmp_path / "none")
    assert one.answers == expected[0]


def test_an_engine_without_prefix_caching_has_no_sessions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, path = tmp_path / "kept", tmp_path / "a.session"
    with causal_llm(1) as llm:
        Conversation(0, "a").talk(llm)
        llm.save_session("a", path)
    with causal_llm(1, cache_prompt=False, session_dir=str(kept)) as llm:
        Conversation(0, "b").talk(llm)
        with pytest.raises(SessionError, match="cache_prompt is False"):
            llm.save_session("b", tmp_path / "b.session")
        with pytest.raises(SessionError, match="cache_prompt is False"):
            llm.load_session("b", path)
        assert llm.stats().sessions.in_memory == 0
    assert "no sessions are kept: cache_prompt is False" in caplog.text
    assert list(tmp_path.iterdir()) == [path]


def test_a_user_of_a_subclass_has_the_same_session(tmp_path: Path) -> None:
    with causal_llm(1, session_dir=str(tmp_path)) as llm:
        Conversation(0, np.str_("alice")).talk(llm)
        (info,) = llm.sessions()
        assert type(info.user) is str
    assert list(tmp_path.glob("*.session"))
    with causal_llm(1, session_dir=str(tmp_path)) as llm:
        llm.forget("alice")
    assert not list(tmp_path.glob("*.session"))


def test_a_closed_engine_removes_no_sessions(tmp_path: Path) -> None:
    with causal_llm(1, session_dir=str(tmp_path)) as llm:
        Conversation(0, "a").talk(llm)
    with pytest.raises(EngineClosedError, match="it removes no sessions"):
        llm.forget("a")
    assert list(tmp_path.glob("*.session"))


def test_a_closed_engine_loads_no_sessions(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with causal_llm(1) as llm:
        Conversation(0, "a").talk(llm)
        llm.save_session("a", path)
    with pytest.raises(EngineClosedError, match="it loads no sessions"):
        llm.load_session("b", path)
    assert llm.stats().sessions.in_memory == 0


def test_sessions_put_in_by_hand_are_in_nobodys_way(tmp_path: Path) -> None:
    """A few may be read from disk at a time for requests that wait; these do not count."""
    path = tmp_path / "a.session"
    with causal_llm(1, session_dir=str(tmp_path / "kept")) as llm:
        one = Conversation(0, "a")
        one.talk(llm)
        llm.save_session("a", path)
        for number in range(10):
            llm.load_session(f"user {number}", path)
        Conversation(1, "b").talk(llm)
        assert one.talk(llm) > 0


def test_a_request_without_reuse_drops_a_loaded_session(tmp_path: Path) -> None:
    asked = Conversation(0, "a").question()
    with causal_llm(2) as llm:
        Conversation(0, "a").talk(llm)
        llm.save_session("a", tmp_path / "a.session")
        llm.load_session("b", tmp_path / "a.session")
        assert ("b", "memory") in [(one.user, one.place) for one in llm.sessions()]
        params = replace(GREEDY, cache_prompt=False)
        llm.submit(asked, user="b", params=params).result()
        assert [one.user for one in llm.sessions()] == ["a", "b"]
        for user in ("c", "d"):
            Conversation(1, user).talk(llm)
        assert [one.user for one in llm.sessions()] == ["c", "d"]


def test_users_of_two_owners_share_a_name_and_nothing_else(tmp_path: Path) -> None:
    asked = Conversation(0, "a").question()

    def cached(owner: bytes) -> int:
        return llm.submit(asked, user="a", owner=owner, params=GREEDY).result().usage.cached_tokens

    owners = (b"", b"A", b"B")
    with causal_llm(3) as llm:
        assert [cached(owner) for owner in owners] == [0, 0, 0]
        assert [cached(owner) for owner in owners] == [len(asked) - 1] * 3
        assert [slot.user for slot in llm.slots()] == ["a"] * 3
        for owner in owners:
            assert [(one.user, one.place) for one in llm.sessions(owner)] == [("a", "slot")]
        llm.save_session("a", tmp_path / "a.session", owner=b"A")
        llm.forget("a", owner=b"A")
        assert [len(llm.sessions(owner)) for owner in owners] == [1, 0, 1]
        assert [cached(owner) > 0 for owner in owners] == [True, False, True]
        llm.forget("a", owner=b"B")
        llm.load_session("a", tmp_path / "a.session", owner=b"B")
        assert cached(b"B") > 0


def test_a_busy_user_is_forgotten_when_its_request_has_ended(tmp_path: Path) -> None:
    with causal_llm(2, session_memory="10MiB") as llm:
        one = Conversation(0, "a")

        def ask_and_forget() -> Any:
            handle = one.ask(llm)
            llm._engine.step()
            with pytest.raises(UserBusyError, match="user 'a' has a request running"):
                llm.save_session("a", tmp_path / "x")
            llm._engine.forget("a")
            return handle

        one.answered(DEVICE_THREAD.call(ask_and_forget).result())
        assert llm.sessions() == []
        assert one.talk(llm) == 0


def test_chatglm_6b_keeps_token_ids_only(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    with open_llm(1, session_dir=str(tmp_path / "kept")) as llm:
        asked = small_model.PROMPTS[1]
        result = llm.submit(asked, user="a", params=small_model.GREEDY).result()
        llm.save_session("a", path)
        saved = read_file(path, llm._fingerprint())
        assert saved.token_ids == (*asked, *result.token_ids[:-1])
        assert saved.pieces == []
        again = llm.submit([*asked, 1], user="a", params=small_model.GREEDY).result()
        assert again.usage.cached_tokens == 0


def test_portable_operators_restore_too() -> None:
    """Compared with a user who never left: there, chunks of prompts decide how sums are rounded."""
    stayed, left = Conversation(0, "stayed"), Conversation(0, "left")
    settings = {"kernels": "portable", "seq_length": 48, "prefill_chunk": 16}
    with open_llm(1, MODEL, session_memory="10MiB", **settings) as llm:
        for _ in range(2):
            stayed.talk(llm)
        for number in range(2):
            left.talk(llm)
            Conversation(1, f"other {number}").talk(llm)
        assert llm.stats().sessions.restored == 1
    assert (left.answers, left.cached) == (stayed.answers, stayed.cached)


def in_random_order(
    llm: MultiUserLLM, talks: list[Conversation], at_once: int, chance: random.Random
) -> None:
    """One turn of everybody, so many at a time; one request in ten is cancelled and asked again."""
    waiting = talks[:]
    chance.shuffle(waiting)
    while waiting:
        now, waiting = waiting[:at_once], waiting[at_once:]
        handles = []
        for one in now:
            if chance.random() < 0.1:
                cancelled = one.ask(llm)
                cancelled.cancel()
            handles.append(one.ask(llm))
        for one, handle in zip(now, handles):
            one.answered(handle.result())


@pytest.mark.rare
@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_three_hundred_users_on_eight_slots(kept: str, tmp_path: Path) -> None:
    users = 300
    settings = {"memory": {"session_memory": "1GiB"}, "disk": {"session_dir": str(tmp_path)}}[kept]
    talks = [Conversation(number, f"user {number}") for number in range(users)]
    with causal_llm(8, **settings) as llm:
        for turn in range(TURNS):
            in_random_order(llm, talks, 8, random.Random(turn))
    expected = all_alone(range(users), TURNS)
    assert {one.number: one.answers for one in talks} == expected
    later = [cached for one in talks for cached in one.cached[1:]]
    assert sum(cached > 0 for cached in later) >= 0.95 * len(later)


def test_thirty_users_on_three_slots(tmp_path: Path) -> None:
    talks = [Conversation(number, f"user {number}") for number in range(30)]
    with causal_llm(3, session_dir=str(tmp_path), session_memory="100KiB") as llm:
        for turn in range(2):
            in_random_order(llm, talks, 4, random.Random(turn))
    assert {one.number: one.answers for one in talks} == all_alone(range(30), 2)
    assert sum(one.cached[1] > 0 for one in talks) >= 0.95 * len(talks)
