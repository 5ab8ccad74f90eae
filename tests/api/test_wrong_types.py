"""Arguments of a wrong type: one of our errors names them, and nothing else is affected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from typing import Any, Callable

import numpy as np
import pytest

from glm_multiuser import ConfigError, EngineConfig, InvalidParameterError, MultiUserLLM
from glm_multiuser.checkpoint.hub import local_path
from glm_multiuser.errors import CheckpointError, SessionError
from glm_multiuser.progress import show_progress
from glm_multiuser.structured.grammar import Grammar
from tests.api.mocked import GREEDY

CALLS: dict[str, Callable[[MultiUserLLM, Any], object]] = {
    "params": lambda llm, value: llm.submit("a", params=value),
    "params of a chat": lambda llm, value: llm.chat("a", params=value),
    "params of generate": lambda llm, value: llm.generate(["a"], value),
    "params in a list": lambda llm, value: llm.generate(["a"], [value]),
    "history": lambda llm, value: llm.submit("a", params=GREEDY, history=value),
    "history of ids": lambda llm, value: llm.submit([1], params=GREEDY, history=value),
    "reader": lambda llm, value: llm.submit("a", params=GREEDY, reader=value),
    "matcher": lambda llm, value: llm.submit("a", params=GREEDY, matcher=value),
    "group": lambda llm, value: llm.submit("a", params=GREEDY, group=value),
    "group of the queue": lambda llm, value: llm.check_queue(value),
    "owner": lambda llm, value: llm.submit("a", params=GREEDY, owner=value),
    "prompt": lambda llm, value: llm.submit(value, params=GREEDY),
    "prompts": lambda llm, value: llm.generate(value, GREEDY),
    "messages": lambda llm, value: llm.chat_token_ids(value),
    "tools": lambda llm, value: llm.chat_token_ids([{"role": "user", "content": "a"}], value),
    "grammar": lambda llm, value: llm.compile_grammar(value),
    "path": lambda llm, value: llm.load_session("a", value),
    "callback": lambda llm, value: llm.on_step(value),
    "timeout": lambda llm, value: llm.submit("a", params=GREEDY).result(value),
    "drain": lambda llm, value: llm.close(value),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [5, 5.5, "x", object(), {"a": 1}])
def test_a_wrong_type_is_named(llm: MultiUserLLM, name: str, value: Any) -> None:
    field = name.split()[0]
    right: dict[str, Any] = {"prompts": dict, "timeout": (int, float), "drain": (int, float)}
    if isinstance(value, right.get(field, str if field in ("group", "prompt", "path") else ())):
        return
    with pytest.raises(InvalidParameterError, match=rf"^{field}\b") as caught:
        CALLS[name](llm, value)
    assert caught.value.field in (field, None)
    assert llm.failure is None
    assert llm.submit("a", params=GREEDY).result().finish_reason == "length"


@pytest.mark.parametrize("call", ["save_session", "load_session", "forget"])
def test_sessions_have_names(llm: MultiUserLLM, call: str, tmp_path: Path) -> None:
    where = [] if call == "forget" else [tmp_path / "session"]
    for user in (None, True, 5.5):
        with pytest.raises(InvalidParameterError, match=f"user is {user}"):
            getattr(llm, call)(user, *where)


@pytest.mark.parametrize("value", [5, None, object()])
def test_checkpoints_grammars_and_progress(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint is .*; it must be a path or a name"):
        local_path(value)
    with pytest.raises(ConfigError, match=r"model_config is .*; it must be a CausalConfig"):
        MultiUserLLM.from_config(value)
    with pytest.raises(
        InvalidParameterError, match=r"grammar of kind choice .*; it must be a list"
    ):
        Grammar.choice(value)
    with pytest.raises(InvalidParameterError, match=r"tool_call has tools .*; it must be a list"):
        Grammar.tool_call(value)
    if value is not None:
        with pytest.raises(InvalidParameterError, match=r"progress is .*; it must be of type Call"):
            show_progress(value).__enter__()


@pytest.mark.parametrize("setting", ["weight_cache", "compile_cache_dir", "session_dir"])
@pytest.mark.parametrize("value", [5, b"x", ["x"], True, "a\0b"])
def test_folders_have_names(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting} is .*; \w"):
        EngineConfig(**{setting: value})


def test_a_number_too_long_to_write_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^users is <int>; it must be between"):
        EngineConfig(users=10**5000)


def test_a_session_file_whose_name_cannot_be(llm: MultiUserLLM) -> None:
    llm.submit("a", user="alice", params=GREEDY).result()
    for call in (llm.save_session, llm.load_session):
        with pytest.raises(SessionError, match="null byte"):
            call("alice", "a\0b")


@pytest.mark.parametrize("texts", [{"a": 1, "b": 2}.keys(), np.array(["a", "b"]), iter("ab")])
def test_a_grammar_takes_what_can_be_counted_through(texts: Iterable[str]) -> None:
    assert Grammar.choice(texts) == Grammar.choice(["a", "b"])
    tool = {"type": "function", "function": {"name": "f"}}
    assert Grammar.tool_call({1: tool}.values()) == Grammar.tool_call([tool])


@pytest.mark.parametrize("seconds", [np.int64(60), np.float32(60), True])
def test_seconds_are_any_number(llm: MultiUserLLM, seconds: Any) -> None:
    assert llm.submit("a", params=GREEDY).result(seconds).finish_reason == "length"
    llm.close(seconds)


def test_no_number_of_seconds_closes_nothing(llm: MultiUserLLM) -> None:
    with pytest.raises(InvalidParameterError, match="drain is nan; it must be a number of seconds"):
        llm.close(float("nan"))
    assert llm.submit("a", params=GREEDY).result().finish_reason == "length"


@pytest.mark.parametrize("seconds", [10**400, float("inf")])
def test_times_that_threads_cannot_wait_for(llm: MultiUserLLM, seconds: float) -> None:
    assert llm.submit("a", params=GREEDY).result(seconds).finish_reason == "length"
    llm._saving = Thread(target=lambda: None)  # as while packed weights are being written
    llm._saving.start()
    llm.close(seconds)
