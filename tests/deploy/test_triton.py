"""A real Triton server on our model repository, with its supervisor, as the command starts it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Optional
from urllib.error import HTTPError

import mindspore  # noqa: F401  before anything that imports protobuf
import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.deploy.triton_client import BUSY, PROBE, TritonClient
from tests.conformance.asking import (
    MAX_TOKEN,
    PATIENCE,
    QUESTIONS,
    Target,
    answers_of,
    ask,
    client_inputs,
)
from tests.deploy.triton_process import (
    LONG,
    LONG_PARAMETERS,
    SEQ_LENGTH,
    STREAM,
    TRIES,
    USERS,
    WHOLE,
    GrpcStream,
    TritonProcess,
    events_of,
    grpc_inputs,
    post,
    text_of,
)
from tests.server.process import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("pytriton") is None, reason="needs pip install 'glm-multiuser[triton]'"
    ),
]

PROMISED_SECONDS = 10.0
SAMPLED: dict[str, Any] = {"top_k": 20, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonProcess]:
    with TritonProcess() as process:
        yield process
        tritonserver = process.tritonserver
        assert process.stop() == 0, process.lines[-20:]
    assert not Path(f"/proc/{tritonserver}").exists()
    assert not list(Path("/dev/shm").glob(f"glm_multiuser_{process.pid}_*"))


@pytest.fixture(scope="module")
def llm() -> Iterator[MultiUserLLM]:
    checkpoint = ROOT / "ckpt/glm-tiny"
    with MultiUserLLM.from_pretrained(checkpoint, users=USERS, seq_length=SEQ_LENGTH) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: MultiUserLLM) -> list[str]:
    """Answers to the questions, one after the other, without a server."""
    params = SamplingParams(temperature=0.0, max_tokens=int(MAX_TOKEN))
    return [llm.submit(question, params=params).result().text for question in QUESTIONS]


@pytest.fixture
def target(triton: TritonProcess) -> Target:
    return Target(triton.url, WHOLE, control=True, own=False)


@pytest.fixture
def grpc(triton: TritonProcess) -> Iterator[Any]:
    with triton.grpc() as client:
        yield client


@pytest.fixture
def stream(triton: TritonProcess) -> Iterator[Callable[..., GrpcStream]]:
    """Asks over a gRPC stream."""
    clients = []

    def start(prompt: str, parameters: Any = None, **texts: str) -> GrpcStream:
        clients.append(triton.grpc())
        return GrpcStream(clients[-1], prompt, parameters, **texts)

    yield start
    for client in clients:
        client.stop_stream(cancel_requests=True)
        client.close()


def generate_stream(triton: TritonProcess, model: str, body: dict[str, Any]) -> list[Any]:
    with post(f"{triton.url}/v2/models/{model}/generate_stream", body) as reply:
        return list(events_of(reply))


def question(prompt: str, max_token: str = MAX_TOKEN) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": "0", "max_token": max_token}


def test_the_conformance_suite_of_our_own_server(triton: TritonProcess) -> None:
    environment = {**os.environ, "V2_URL": triton.url, "V2_MODEL": WHOLE, "V2_CONTROL": "1"}
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance"]
    run = subprocess.run(
        suite, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


def test_both_clients_get_what_the_library_answers(
    triton: TritonProcess, target: Target, grpc: Any, alone: list[str]
) -> None:
    with tritonclient.http.InferenceServerClient(target.address) as client:
        batch = answers_of(client.infer(WHOLE, client_inputs(QUESTIONS[:4])))
    assert [one.response for one in batch] == alone[:4]
    for prompt, expected in zip(QUESTIONS, alone):
        result = grpc.infer(WHOLE, grpc_inputs(prompt))
        assert text_of(result) == expected
        assert json.loads(text_of(result, "history")) == [[prompt, expected]]


def test_streams_add_up_to_what_the_library_answers(
    triton: TritonProcess, stream: Callable[..., GrpcStream], alone: list[str]
) -> None:
    for prompt, expected in zip(QUESTIONS[:4], alone):
        *pieces, last = stream(prompt)
        assert len(pieces) > 1
        assert "".join(text_of(one) for one in [*pieces, last]) == expected
        assert json.loads(text_of(last, "history")) == [[prompt, expected]]
        assert text_of(last, "finish_reason") in ("stop", "length")
        events = generate_stream(triton, STREAM, question(prompt))
        assert "".join(one["response"] for one in events) == expected
        assert [one for one in events if "history" in one] == events[-1:]


def test_sampling_parameters_beside_the_inputs(
    triton: TritonProcess, stream: Callable[..., GrpcStream], llm: MultiUserLLM
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, **SAMPLED)
    expected = llm.submit("hello", params=params).result().text
    texts = {"temperature": "0.8", "max_token": "30"}
    body = {"prompt": "hello", **texts, "parameters": SAMPLED}
    assert generate_stream(triton, WHOLE, body)[0]["response"] == expected
    sampled = stream("hello", {**SAMPLED, "top_p": "0.95"}, **texts)  # gRPC sends no floats
    assert "".join(map(text_of, sampled)) == expected


def test_ten_prompts_from_four_threads(triton: TritonProcess, alone: list[str]) -> None:
    with triton.grpc() as client, ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda one: client.infer(WHOLE, grpc_inputs(one)), QUESTIONS)
        assert [text_of(result) for result in results] == alone


def test_a_long_answer_does_not_hold_up_a_short_one(
    triton: TritonProcess, stream: Callable[..., GrpcStream]
) -> None:
    long = iter(stream("hello", LONG_PARAMETERS, **LONG))
    next(long)
    ended = triton.outcomes(STREAM)
    assert generate_stream(triton, STREAM, question("hello", "2"))
    triton.wait_for_outcome(STREAM, "length", ended.count("length") + 1)
    assert len(list(long)) > 300


def test_answers_come_in_the_order_of_their_ends(triton: TritonProcess) -> None:
    """The longest is asked for first."""
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with triton.grpc() as client:
        for length in (LONG["max_token"], "2"):
            inputs = grpc_inputs("hello", **{**LONG, "max_token": length})
            client.async_infer(
                WHOLE,
                inputs,
                lambda result, error, length=length: ends.put((length, error)),
                parameters=LONG_PARAMETERS,
            )
        assert [ends.get(timeout=PATIENCE) for _ in range(2)] == [
            ("2", None),
            (LONG["max_token"], None),
        ]


def test_a_request_that_its_client_cancels_frees_its_slot(
    triton: TritonProcess, grpc: Any, stream: Callable[..., GrpcStream], alone: list[str]
) -> None:
    def close_a_stream() -> int:
        streaming = stream("hello", LONG_PARAMETERS, **LONG)
        next(iter(streaming))
        streaming.cancel()
        return 1

    def close_a_connection() -> int:
        body = {"prompt": "hello", **LONG, **LONG_PARAMETERS}
        with post(f"{triton.url}/v2/models/{STREAM}/generate_stream", body) as reply:
            next(events_of(reply))
        return 1

    def cancel_whole_answers() -> int:
        inputs = grpc_inputs("hello", **LONG)
        running = [
            grpc.async_infer(WHOLE, inputs, lambda result, error: None, parameters=LONG_PARAMETERS)
            for _ in range(USERS - 1)
        ]
        # Its answer means that those before it have their slots.
        assert text_of(grpc.infer(WHOLE, grpc_inputs(QUESTIONS[0]))) == alone[0]
        for one in running:
            one.cancel()
        return len(running)

    triton.cancels(STREAM, close_a_stream)
    triton.cancels(STREAM, close_a_connection)
    triton.cancels(WHOLE, cancel_whole_answers, whole=1)


def test_a_probe_of_a_busy_model_does_not_wait(
    triton: TritonProcess, stream: Callable[..., GrpcStream]
) -> None:
    """The supervisor takes the rejection for an answer, and does not load the model again."""
    probe = {**question("hi", "1"), PROBE: True}

    client = TritonClient("127.0.0.1", triton.ports["http"])

    def rejection() -> Optional[tuple[bool, str]]:
        before = len(triton.outcomes(STREAM))
        streams = [stream("hello", {"seed": seed}, **LONG) for seed in range(USERS)]
        for one in streams:
            next(iter(one))
        try:
            generate_stream(triton, STREAM, probe)
        except HTTPError as error:
            return client.answers(STREAM, PATIENCE), error.read().decode()
        finally:
            for one in streams:
                one.cancel()
            triton.wait_for_end(STREAM, before + USERS)
        return None

    # An answer may come to its end before the probe.
    answers, said = next(filter(None, (rejection() for _ in range(TRIES))))
    assert answers
    assert BUSY in said
    assert generate_stream(triton, STREAM, probe)[-1]["history"]


def test_an_error_ends_only_its_own_request(
    triton: TritonProcess, grpc: Any, alone: list[str]
) -> None:
    with ThreadPoolExecutor(4) as threads:
        good = [threads.submit(grpc.infer, WHOLE, grpc_inputs(prompt)) for prompt in QUESTIONS[:3]]
        with pytest.raises(InferenceServerException, match=r"max_token: .* not '0'"):
            grpc.infer(WHOLE, grpc_inputs("hello", max_token="0"))
        assert [text_of(one.result()) for one in good] == alone[:3]
    for model in (WHOLE, STREAM):
        with pytest.raises(HTTPError) as refused:
            generate_stream(triton, model, {"prompt": "x" * 9000})
        with refused.value as reply:
            assert reply.code == 400
            assert f"with seq_length {SEQ_LENGTH}" in reply.read().decode()


def test_unloading_and_loading_under_traffic(
    triton: TritonProcess, target: Target, alone: list[str]
) -> None:
    reloaded = threading.Event()
    answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    refusals: list[str] = []

    def asks(place: int) -> None:
        with triton.grpc() as client:
            while not reloaded.is_set():
                try:
                    result = client.infer(WHOLE, grpc_inputs(QUESTIONS[place]))
                except InferenceServerException as error:
                    refusals.append(error.message())
                    reloaded.wait(0.05)  # a model that is away refuses at once
                else:
                    answers.put((place, text_of(result)))

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(asks, place) for place in range(3)]
        with tritonclient.http.InferenceServerClient(target.address) as client:
            try:
                first, text = answers.get(timeout=PATIENCE)
                assert text == alone[first]
                client.unload_model(WHOLE)
                client.load_model(WHOLE)
            finally:
                reloaded.set()
        for one in running:
            one.result(PATIENCE)
    while not answers.empty():
        place, text = answers.get()
        assert text == alone[place]
    assert all(WHOLE in refusal for refusal in refusals), refusals
    assert ask(target, QUESTIONS[:1])[0].response == alone[0]


@pytest.mark.parametrize("model", [WHOLE, STREAM])
def test_a_killed_model_comes_back(triton: TritonProcess, model: str, alone: list[str]) -> None:
    stub = triton.stub(model)
    assert stub is not None
    recoveries = triton.recoveries(model)
    os.kill(stub, signal.SIGKILL)
    start = time.monotonic()
    triton.wait_for_recovery(model, recoveries + 1)
    (*_, last) = generate_stream(triton, model, question(QUESTIONS[0]))
    print(f"{model} answers {time.monotonic() - start:.1f} s after the kill; {PROMISED_SECONDS=}")
    assert json.loads(last["history"]) == [[QUESTIONS[0], alone[0]]]
    assert triton.stub(model) not in (None, stub)


def test_a_killed_server_comes_back(triton: TritonProcess, alone: list[str]) -> None:
    killed = triton.tritonserver
    stubs = [triton.stub(model) for model in (WHOLE, STREAM)]
    count = len(triton.events("ready"))
    os.kill(killed, signal.SIGKILL)
    assert triton.wait_for("ready", count + 1)["http"] == triton.ports["http"]
    assert triton.events("tritonserver lost")[-1]["code"] == -signal.SIGKILL
    assert triton.tritonserver != killed
    for model in (WHOLE, STREAM):
        (*_, last) = generate_stream(triton, model, question(QUESTIONS[0]))
        assert json.loads(last["history"]) == [[QUESTIONS[0], alone[0]]]
    assert not any(Path(f"/proc/{stub}").exists() for stub in stubs)


def test_shapes_are_those_of_the_signature(triton: TritonProcess, grpc: Any) -> None:
    result = grpc.infer(WHOLE, grpc_inputs("hello"))
    assert result.as_numpy("response").shape == (1, 1)
    assert result.as_numpy("response").dtype == np.object_
