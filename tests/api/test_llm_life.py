"""An engine from its checkpoint to its end: defaults, size, numbers, closing."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, Callable

import pytest

import glm_multiuser.llm
from glm_multiuser import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineConfig,
    ModelConfig,
    MultiUserLLM,
    SamplingParams,
)
from glm_multiuser.engine.engine import Engine
from tests.api.mocked import GREEDY, Open, runner_of
from tests.checkpoint.folders import QWEN2, write_json
from tests.engine.mock_runner import SEQ_LENGTH, VOCAB, Call, Gate, MockRunner

# From a folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose weights are not read, because the runner is a mock."""
    values = {
        "model_type": "chatglm",
        "position_encoding_2d": True,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "inner_hidden_size": 128,
        "eos_token_id": 17,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(glm_multiuser.llm, "load_weights", lambda folder, model_config: None)
    monkeypatch.setattr(
        glm_multiuser.llm,
        "build_runner",
        lambda model_config, config, fill, progress: (MockRunner(config.users), None),
    )
    return tmp_path


def test_defaults_come_from_generation_config_json(folder: Path) -> None:
    values = {"do_sample": False, "max_new_tokens": 5, "top_p": 0.7, "eos_token_id": [9, 17]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    with MultiUserLLM.from_pretrained(folder, users=3, seq_length=SEQ_LENGTH) as llm:
        assert llm.default_params == SamplingParams(temperature=0.0, top_p=0.7, max_tokens=5)
        assert llm.tokenizer is None
        assert llm.stop_token_ids == (9, 17)
        assert llm.config == EngineConfig(users=3, seq_length=SEQ_LENGTH)
        assert len(llm.submit([1]).result().token_ids) <= 5


def test_without_generation_config_json_the_defaults_are_our_own(folder: Path) -> None:
    with MultiUserLLM.from_pretrained(str(folder)) as llm:
        assert llm.default_params == SamplingParams()


@pytest.mark.parametrize("value", [None, []])
def test_ends_of_generation_config_json_alone(folder: Path, value: Any) -> None:
    write_json(folder / "config.json", {**QWEN2, "eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"config.json .*tokenizer_config.json an eos_token"):
        MultiUserLLM.from_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": 3})
    with MultiUserLLM.from_pretrained(folder, seq_length=SEQ_LENGTH) as llm:
        assert llm.stop_token_ids == (3,)


@pytest.mark.parametrize("value", ["high", 7.0])
def test_defaults_that_cannot_work(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"top_p": value}))
    with pytest.raises(CheckpointError, match="top_p"):
        MultiUserLLM.from_pretrained(folder)


def test_settings_are_checked_before_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="users is 0"):
        MultiUserLLM.from_pretrained(tmp_path / "missing", users=0)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        MultiUserLLM.from_pretrained(tmp_path / "missing")


def test_a_model_with_random_weights(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    with MultiUserLLM.from_config(config, users=4, seq_length=SEQ_LENGTH) as llm:
        assert llm.config == EngineConfig(users=4, seq_length=SEQ_LENGTH)
        assert llm.stop_token_ids == (17,)
        assert llm.default_params == SamplingParams()


# Size, numbers, end


def test_stats_describe_the_engine(open_llm: Open) -> None:
    llm = open_llm(users=3)
    llm.generate([[1, 2], [3]], GREEDY)
    llm.submit([4], params=GREEDY, user="a").result()
    stats = llm.stats()
    # A slot is kept for a user with a name, who may come back.
    assert (stats.users, stats.active_users, stats.idle_users, stats.waiting) == (3, 0, 1, 0)
    assert (stats.prompt_tokens, stats.tokens_generated) == (4, 24)
    assert (stats.compiles, stats.compiles_after_ready) == (3, 0)
    assert 1 <= stats.mean_batch <= 2
    assert stats.cache_bytes_per_user == MockRunner.cache_bytes_per_user
    assert stats.start_seconds == 1.5
    assert stats.overhead_seconds > 0
    assert stats.batch_invariant


def test_stats_of_an_engine_that_did_nothing(llm: MultiUserLLM) -> None:
    assert llm.stats().mean_batch == 0
    assert llm.stats().steps == 0


def test_a_resize_while_requests_run(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=2, gated=True)
    handles = [llm.submit([n], params=GREEDY) for n in range(3)]
    for _ in range(3):
        gate.wait()
        gate.let_pass()
    gate.open()
    seen: list[str] = []
    llm.resize(5, progress=lambda done, total, what: seen.append(what))
    results = [handle.result() for handle in handles]
    assert llm.config.users == llm.stats().users == 5
    assert llm.stats().compiles_after_ready == 0
    assert seen == ["mock"]
    expected = open_llm(users=1).generate([[n] for n in range(3)], GREEDY)
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]


def test_the_last_of_concurrent_resizes_counts(
    open_llm: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(users=2)
    resize, first_is_done, second_is_done = Engine.resize, threading.Event(), threading.Event()

    def return_last(self: Engine, users: int, *rest: Any) -> None:
        resize(self, users, *rest)
        if users == 3:
            first_is_done.set()
            assert second_is_done.wait(60)

    monkeypatch.setattr(Engine, "resize", return_last)
    first = threading.Thread(target=llm.resize, args=(3,))
    first.start()
    assert first_is_done.wait(60)
    llm.resize(5)
    second_is_done.set()
    first.join()
    assert llm.config.users == llm.stats().users == 5


def test_a_resize_out_of_range_changes_nothing(llm: MultiUserLLM) -> None:
    with pytest.raises(ConfigError, match="users is 0; it must be between 1 and 1024"):
        llm.resize(0)
    assert llm.stats().users == 2
    assert runner_of(llm).calls == []


def test_cells_shrink_and_grow_with_the_users(open_llm: Open) -> None:
    llm = open_llm(users=4, users_per_cell=3)
    llm.resize(2)
    assert (llm.config.users, llm.config.users_per_cell) == (2, 2)
    llm.resize(5)
    assert (llm.config.users, llm.config.users_per_cell) == (5, 3)
    with pytest.raises(ConfigError, match="users is 0"):
        llm.resize(0)
    with pytest.raises(ConfigError, match="users is '3'"):
        llm.resize("3")  # type: ignore[arg-type]


def test_a_resize_that_fails_leaves_the_old_size(open_llm: Open) -> None:
    def refuse(call: Call) -> None:
        if call.users == 9:
            raise MemoryError("9 are too many")

    llm = open_llm(users=2, before=refuse)
    with pytest.raises(MemoryError, match="9 are too many"):
        llm.resize(9)
    assert llm.config.users == llm.stats().users == 2
    assert llm.stats().compiles_after_ready == 0
    assert llm.submit([1], params=GREEDY).result().finish_reason == "length"


def test_leaving_the_block_finishes_what_was_accepted(open_llm: Open) -> None:
    with open_llm(users=1) as llm:
        handles = [llm.submit([n], params=GREEDY) for n in range(4)]
    assert [handle.result().finish_reason for handle in handles] == ["length"] * 4
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        llm.submit([1])
    assert llm.stats().active_users == 0
    llm.close()


def test_leaving_the_block_with_an_error_does_not_wait(
    llm: MultiUserLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(llm, "close", lambda drain: drains.append(drain))
        with pytest.raises(ZeroDivisionError), llm:
            raise ZeroDivisionError
        with llm:
            pass
    assert drains == [0.0, 30.0]


# For servers
def test_slots_steps_and_numbers_are_told(open_llm: Open) -> None:
    llm = open_llm(users=2)
    told: list[str] = []
    llm.on_step(lambda report: told.append(report.kind))
    first, second = (llm.submit([1], params=GREEDY, user=user) for user in ("a", "b"))
    first.result()
    second.result()
    assert first.number != second.number
    assert {slot.user for slot in llm.slots()} == {"a", "b"}
    assert {slot.state for slot in llm.slots()} == {"idle"}
    assert set(told) == {"prefill", "decode"}
    assert llm.failure is None


def test_pieces_carry_the_log_probabilities_of_their_tokens(llm_of_ids: MultiUserLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    handle = llm_of_ids.submit([1], params=params)
    pieces = list(handle)
    told = [one for piece in pieces for one in piece.logprobs or ()]
    assert tuple(told) == handle.result().logprobs
    assert [one.token_id for one in told] == [one for piece in pieces for one in piece.token_ids]


def test_while_a_model_is_loaded_the_others_go_on(
    open_llm: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that only ends once another engine's request has ended."""
    other = open_llm(users=1)
    answered: list[Any] = []

    def build(*arguments: Any) -> tuple[MockRunner, None]:
        _, config, _, progress = arguments
        handle = other.submit([1], params=GREEDY)
        deadline = threading.Event()
        while other.stats().tokens_generated < 8:
            deadline.wait(0.001)  # what a graph takes to compile
            progress(0, 1, "a graph")
        answered.append(handle.result(0.0) if other.stats().active_users == 0 else None)
        return MockRunner(config.users), None

    monkeypatch.setattr(glm_multiuser.llm, "build_runner", build)
    with MultiUserLLM.from_pretrained(folder, users=1, seq_length=SEQ_LENGTH):
        assert len(answered[0].token_ids) == 8


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_process_is_told(llm: MultiUserLLM, busy: bool) -> None:
    llm.submit("who", params=GREEDY).result()
    gate = Gate()
    runner_of(llm).before = gate
    running = [llm.submit("who", params=GREEDY)] if busy else []
    reading = [call for one in running for call in (one.result, one.__next__)]
    calls: list[Callable[[], object]] = [
        lambda: llm.submit("who", params=GREEDY),
        *(llm.check_queue, llm.stats, llm.slots, llm.close, lambda: llm.forget("who")),
        *reading,
    ]
    child = os.fork()
    if not child:
        told = 0
        signal.alarm(60)  # a call that waits for ever
        try:
            for call in calls:
                try:
                    call()
                except EngineClosedError as error:
                    told += f"forked from process {os.getppid()}" in str(error)
        finally:
            os._exit(len(calls) - told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.open()
    assert all(one.result().token_ids for one in running)
    assert llm.submit("who", params=GREEDY).result().token_ids
