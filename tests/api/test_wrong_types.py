"""Arguments of a wrong type: one of our errors names them, and nothing else is affected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser import ConfigError, InvalidParameterError, MultiUserLLM
from glm_multiuser.checkpoint.hub import local_path
from glm_multiuser.errors import CheckpointError
from glm_multiuser.grammar import Grammar
from glm_multiuser.progress import show_progress
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


@pytest.mark.parametrize("seconds", [10**30, float("inf")])
def test_times_that_threads_cannot_wait_for(llm: MultiUserLLM, seconds: float) -> None:
    assert llm.submit("a", params=GREEDY).result(seconds).finish_reason == "length"
    llm.close(seconds)
