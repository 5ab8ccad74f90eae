"""Loading and unloading the model, where that is allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.conformance.asking import Target, ask, client_inputs, send

pytestmark = pytest.mark.usefixtures("controlled")


@pytest.fixture(autouse=True)
def _loaded_afterwards(client: InferenceServerClient, target: Target) -> Iterator[None]:
    yield
    if not client.is_model_ready(target.model):
        client.load_model(target.model)


@pytest.mark.slow
def test_an_unloaded_model_answers_nothing_until_it_is_loaded(
    client: InferenceServerClient, target: Target
) -> None:
    before = ask(target, ["hello"])
    client.unload_model(target.model)
    assert not client.is_model_ready(target.model)
    (entry,) = [one for one in client.get_model_repository_index() if one["name"] == target.model]
    assert entry.get("state") != "READY"
    with pytest.raises(InferenceServerException):
        client.infer(target.model, client_inputs(["hello"]))
    client.load_model(target.model)
    assert client.is_model_ready(target.model)
    assert ask(target, ["hello"]) == before


def test_loading_a_loaded_model_leaves_it_ready(
    client: InferenceServerClient, target: Target
) -> None:
    client.load_model(target.model)
    assert client.is_model_ready(target.model)


def test_a_model_accepts_its_own_configuration(
    client: InferenceServerClient, target: Target
) -> None:
    client.load_model(target.model, config=json.dumps(client.get_model_config(target.model)))
    assert client.is_model_ready(target.model)


def test_an_empty_body_loads(client: InferenceServerClient, target: Target) -> None:
    assert send(target, f"/v2/repository/models/{target.model}/load", b"").status == 200


@pytest.mark.parametrize(
    "call",
    [
        lambda client, target: client.load_model("no-such-model"),
        lambda client, target: client.load_model(target.model, config="{"),
        lambda client, target: client.load_model(target.model, config='{"nonsense": 1}'),
    ],
    ids=["unknown model", "no JSON", "unknown key"],
)
def test_a_load_that_cannot_be_leaves_the_model_as_it_was(
    client: InferenceServerClient, target: Target, call: object
) -> None:
    assert callable(call)
    with pytest.raises(InferenceServerException) as caught:
        call(client, target)
    assert caught.value.status() in ("400", "404") or not target.own
    assert "decoding the response" not in caught.value.message()
    assert client.is_model_ready(target.model)
    ask(target, ["hello"])
