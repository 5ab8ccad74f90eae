"""Sampling parameters of KServe v2 requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser import SamplingParams
from tests.server.asking import answer_alone, post
from tests.server.in_process import InProcessServer, in_process_server, mock_llm, mock_settings
from tests.server.kserve_asking import PATH, column, infer, refusal


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    """One with room for every test here."""
    with in_process_server(mock_settings(users=4, max_queue=64)) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", "warm", "a valid number"),
        ("temperature", "-0.1", "greater than or equal to 0"),
        ("temperature", "100.1", "less than or equal to 100"),
        ("temperature", "nan", "100"),
        ("temperature", "inf", "100"),
        ("max_token", "0", "greater than or equal to 1"),
        ("max_token", "1.5", "a valid integer"),
        ("max_token", "9" * 5000, "integer"),
    ],
)
def test_a_number_that_cannot_be_is_named(
    server: InProcessServer, name: str, value: str, limit: str
) -> None:
    body = {"inputs": [column("prompt", "q"), column(name, value)]}
    status, error = refusal(server, body)
    assert status == 400
    assert error.startswith(f"{name}: ")
    assert f"not {value[:40]!r}"[:-1] in error
    assert limit in error
    assert refusal(server, {"prompt": "q", name: value}, "generate") == (400, error)


def test_a_negative_history_len_is_named(server: InProcessServer) -> None:
    body = {"inputs": [column("prompt", "q"), column("history_len", -1, datatype="INT16")]}
    assert refusal(server, body) == (
        400,
        "history_len: Input should be greater than or equal to 0, not -1",
    )


@pytest.fixture
def asked() -> Iterator[tuple[InProcessServer, list[SamplingParams]]]:
    """A server whose checkpoint has defaults of its own, and what its engine was asked."""
    defaults = SamplingParams(temperature=0.5, top_k=3, max_tokens=4)
    params: list[SamplingParams] = []

    def open_llm(settings: Any, **options: Any) -> Any:
        llm = mock_llm(settings, params=defaults, **options)
        submit = llm.asubmit

        def listening(ids: Any, **named: Any) -> Any:
            params.append(named["params"])
            return submit(ids, **named)

        llm.asubmit = listening  # type: ignore[method-assign, assignment]
        return llm

    with in_process_server(open_llm=open_llm) as server:
        params.clear()
        yield server, params


GIVEN = {"top_p": 0.5, "top_k": 7, "seed": 11, "repetition_penalty": 1.5, "stop": ["x", "yz"]}
TWO = {"max_token": 2}
WANTED = {**GIVEN, "stop": ("x", "yz")}


def sampled(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "max_tokens", *GIVEN)}


def test_what_is_not_given_is_as_the_checkpoint_recommends(
    asked: tuple[InProcessServer, list[SamplingParams]],
) -> None:
    server, params = asked
    infer(server, column("prompt", "q"), column("temperature", ""), column("max_token", ""))
    post(server, f"{PATH}/generate", {"prompt": "q"})
    assert params == [SamplingParams(temperature=0.5, top_k=3, max_tokens=4)] * 2


def test_sampling_of_an_inference(
    asked: tuple[InProcessServer, list[SamplingParams]],
) -> None:
    server, params = asked
    inputs = [column("prompt", "q"), column("temperature", "0.25"), column("max_token", "2")]
    infer(server, *inputs, parameters={**GIVEN, "max_tokens": 3, "temperature": 1})
    infer(server, column("prompt", "q"), parameters={"temperature": 0, "stop": "x"})
    assert sampled(params[0]) == {**WANTED, "temperature": 0.25, "max_tokens": 2}
    assert (params[1].temperature, params[1].stop, params[1].max_tokens) == (0.0, ("x",), 4)


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_sampling_of_generate(
    asked: tuple[InProcessServer, list[SamplingParams]], path: str
) -> None:
    server, params = asked
    wanted = {**WANTED, "temperature": 0.25, "max_tokens": 2}
    for body in (
        {"text_input": "q", "parameters": {**GIVEN, "temperature": 0.25, "max_tokens": 2}},
        {"text_input": "q", "temperature": "0.25", "max_tokens": 2, **GIVEN},
        {"prompt": "q", "temperature": "0.25", "max_token": "2", "parameters": GIVEN},
        {"prompt": "q", "temperature": 9, "parameters": {**GIVEN, "temperature": 0.25}, **TWO},
    ):
        assert post(server, f"{PATH}/{path}", body).status_code == 200
        assert sampled(params.pop()) == wanted


@pytest.mark.parametrize(
    "parameters",
    [{"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"seed": -1}, {"repetition_penalty": 0}],
)
def test_a_parameter_that_cannot_be(server: InProcessServer, parameters: dict[str, Any]) -> None:
    ((name, value),) = parameters.items()
    body = {"inputs": [column("prompt", "q")], "parameters": parameters}
    status, error = refusal(server, body)
    assert status == 400
    assert f"parameters.{name}: " in error
    assert f"not {value}" in error


def test_parameters_that_mean_nothing_here_are_ignored(server: InProcessServer) -> None:
    parameters = {"priority": 2, "sequence_start": True, "sequence_end": True, "own": "thing"}
    outputs = infer(server, column("prompt", "hello"), parameters=parameters)
    assert outputs["response"] == [answer_alone("hello")]
