"""Health, metadata, configuration and statistics."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.conformance.asking import QUESTIONS, Target, ask, send

UNKNOWN = "no-such-model"


def test_server_and_model_are_live_and_ready(client: InferenceServerClient, target: Target) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(target.model)
    assert client.is_model_ready(target.model, "1")


def test_a_version_that_does_not_exist_is_not_ready(
    client: InferenceServerClient, target: Target
) -> None:
    assert not client.is_model_ready(target.model, "99")
    assert not client.is_model_ready(UNKNOWN)


def test_server_metadata(client: InferenceServerClient) -> None:
    metadata = client.get_server_metadata()
    assert metadata["name"]
    assert metadata["version"]
    assert {
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "parameters",
        "statistics",
    } <= set(metadata["extensions"])


@pytest.mark.parametrize("version", ["", "1"])
def test_model_metadata(client: InferenceServerClient, target: Target, version: str) -> None:
    metadata = client.get_model_metadata(target.model, version)
    assert metadata["name"] == target.model
    assert metadata["versions"] == ["1"]
    assert isinstance(metadata["platform"], str)
    inputs = {one["name"]: one for one in metadata["inputs"]}
    assert {"prompt", "history", "temperature", "max_token"} <= set(inputs)
    assert inputs["history_len"]["datatype"] == "INT16"
    assert {one["name"] for one in metadata["outputs"]} == {"response", "history"}
    for one in [*metadata["inputs"], *metadata["outputs"]]:
        assert one["shape"] == [-1, 1]
        assert one["datatype"] == ("INT16" if one["name"] == "history_len" else "BYTES")


def test_model_config(client: InferenceServerClient, target: Target) -> None:
    config = client.get_model_config(target.model)
    assert config["name"] == target.model
    assert config["max_batch_size"] >= 4
    tensors = {one["name"]: one for one in [*config["input"], *config["output"]]}
    assert tensors["prompt"]["data_type"] == "TYPE_STRING"
    assert tensors["response"]["data_type"] == "TYPE_STRING"
    assert tensors["history_len"]["data_type"] == "TYPE_INT16"
    assert all([int(size) for size in one["dims"]] == [1] for one in tensors.values())
    assert client.get_model_config(target.model, "1") == config


def test_statistics_count_every_row_of_a_batch(
    client: InferenceServerClient, target: Target
) -> None:
    before = _statistics(client, target)
    ask(target, QUESTIONS[:3])
    after = _statistics(client, target)
    # A supervisor may ask a server for an answer of its own meanwhile.
    assert int(after["inference_count"]) >= int(before["inference_count"]) + 3
    assert int(after["execution_count"]) > int(before["execution_count"])
    successes = [int(one["inference_stats"]["success"]["count"]) for one in (before, after)]
    assert successes[1] > successes[0]


def test_statistics_of_all_models_have_this_one(
    client: InferenceServerClient, target: Target
) -> None:
    every = client.get_inference_statistics()["model_stats"]
    assert target.model in [one["name"] for one in every]


def _statistics(client: InferenceServerClient, target: Target) -> dict[str, Any]:
    (one,) = client.get_inference_statistics(target.model, "1")["model_stats"]
    assert one["name"] == target.model
    assert one["version"] == "1"
    return dict(one)


def test_repository_index_has_the_model(client: InferenceServerClient, target: Target) -> None:
    entries = {one["name"]: one for one in client.get_model_repository_index()}
    assert entries[target.model]["state"] == "READY"
    assert entries[target.model]["version"] == "1"


def test_repository_index_of_ready_models(target: Target) -> None:
    reply = send(target, "/v2/repository/index", {"ready": True})
    assert reply.status == 200
    assert target.model in [one["name"] for one in reply.json()]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.get_model_metadata(UNKNOWN),
        lambda client: client.get_model_config(UNKNOWN),
        lambda client: client.get_inference_statistics(UNKNOWN),
    ],
    ids=["metadata", "config", "statistics"],
)
def test_an_unknown_model_is_an_error_that_names_it(
    client: InferenceServerClient, call: Any
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call(client)
    assert UNKNOWN in caught.value.message()
    assert caught.value.status() in ("400", "404")


@pytest.mark.parametrize("part", ["", "config", "stats"])
def test_an_unknown_version_is_an_error(target: Target, part: str) -> None:
    path = target.path("versions", "99") + (f"/{part}" if part else "")
    assert send(target, path).error()
