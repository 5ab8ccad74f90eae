"""Every call of `tritonclient.http` works, or is refused with a message that says why."""

from __future__ import annotations

from typing import Any, Callable

import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.conformance.asking import PATIENCE, Target, answers_of, client_inputs

Call = Callable[[InferenceServerClient, Target], Any]

TESTED_ELSEWHERE = {"load_model", "unload_model", "update_log_settings", "update_trace_settings"}
WITHOUT_A_SERVER = {
    "close",
    "generate_request_body",
    "parse_response_body",
    "plugin",
    "register_plugin",
    "unregister_plugin",
}
WORKS: dict[str, Call] = {
    "is_server_live": lambda client, target: client.is_server_live(),
    "is_server_ready": lambda client, target: client.is_server_ready(),
    "is_model_ready": lambda client, target: client.is_model_ready(target.model),
    "get_server_metadata": lambda client, target: client.get_server_metadata(),
    "get_model_metadata": lambda client, target: client.get_model_metadata(target.model),
    "get_model_config": lambda client, target: client.get_model_config(target.model),
    "get_model_repository_index": lambda client, target: client.get_model_repository_index(),
    "get_inference_statistics": lambda client, target: client.get_inference_statistics(),
    "get_trace_settings": lambda client, target: client.get_trace_settings(),
    "get_log_settings": lambda client, target: client.get_log_settings(),
    "infer": lambda client, target: answers_of(
        client.infer(target.model, client_inputs(["hello"]))
    ),
    "async_infer": lambda client, target: answers_of(
        client.async_infer(target.model, client_inputs(["hello"])).get_result(timeout=PATIENCE)
    ),
}
WORKS_OR_REFUSED: dict[str, Call] = {
    "get_system_shared_memory_status": lambda client, target: (
        client.get_system_shared_memory_status()
    ),
    "get_cuda_shared_memory_status": lambda client, target: client.get_cuda_shared_memory_status(),
    "unregister_system_shared_memory": lambda client, target: (
        client.unregister_system_shared_memory("no-such-region")
    ),
    "unregister_cuda_shared_memory": lambda client, target: client.unregister_cuda_shared_memory(
        "no-such-region"
    ),
}
REFUSED: dict[str, Call] = {
    "register_system_shared_memory": lambda client, target: client.register_system_shared_memory(
        "region", "/no-such-memory", 64
    ),
    "register_cuda_shared_memory": lambda client, target: client.register_cuda_shared_memory(
        "region", "bm8gc3VjaCBoYW5kbGU=", 0, 64
    ),
}


def test_no_call_is_forgotten() -> None:
    public = {name for name in dir(InferenceServerClient) if not name.startswith("_")}
    known = {*WORKS, *WORKS_OR_REFUSED, *REFUSED, *TESTED_ELSEWHERE, *WITHOUT_A_SERVER}
    assert public == known


@pytest.mark.parametrize("name", WORKS)
def test_a_call_works(client: InferenceServerClient, target: Target, name: str) -> None:
    assert WORKS[name](client, target)


@pytest.mark.parametrize("name", WORKS_OR_REFUSED)
def test_a_call_works_or_is_refused(
    client: InferenceServerClient, target: Target, name: str
) -> None:
    try:
        WORKS_OR_REFUSED[name](client, target)
    except InferenceServerException as error:
        _check(error)


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_does_not_exist_is_refused(
    client: InferenceServerClient, target: Target, name: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        REFUSED[name](client, target)
    _check(caught.value)


def test_settings_that_are_what_they_are_already(
    client: InferenceServerClient, target: Target
) -> None:
    log = client.get_log_settings()
    level = {"log_verbose_level": log["log_verbose_level"]}
    assert client.update_log_settings(level) == log
    trace = client.get_trace_settings(target.model)
    assert client.update_trace_settings(target.model, {"trace_level": ["OFF"]}) == trace


def test_a_setting_that_cannot_be(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.update_log_settings({"log_file": "/elsewhere/log"})
    _check(caught.value)


def _check(error: InferenceServerException) -> None:
    assert error.message()
    assert "decoding the response" not in error.message()
    assert error.status() in ("400", "404", "500", "501", "503")
