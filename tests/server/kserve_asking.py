"""Helpers to query a mock over KServe v2."""

from __future__ import annotations

import json
import threading
from typing import Any

from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.driving import alone
from tests.engine.mock_runner import EOS
from tests.server.asking import ANSWER_TOKENS, post
from tests.server.in_process import MODEL, PATIENCE, InProcessServer, mock_llm

HALF = "\ud800"
"""Half of a surrogate pair."""
PATH = f"/v2/models/{MODEL}"


def column(name: str, *values: Any, datatype: str = "BYTES", shape: Any = None) -> dict[str, Any]:
    """An input with its data as JSON."""
    shape = shape or [len(values), 1]
    return {"name": name, "shape": shape, "datatype": datatype, "data": list(values)}


def infer(server: InProcessServer, *inputs: dict[str, Any], **fields: Any) -> Any:
    """Returns the outputs {name: data}; a rejection fails the test."""
    answer = post(server, f"{PATH}/infer", {"inputs": list(inputs), **fields})
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def refusal(server: InProcessServer, body: Any, path: str = "infer", **headers: str) -> Any:
    """(status, error)."""
    answer = post(server, f"{PATH}/{path}", body, **headers)
    assert set(answer.json()) == {"error", "code"}
    return answer.status_code, answer.json()["error"]


def compact(value: Any) -> str:
    """JSON in the format of a history."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def answer_to(prompt: str, history: Any = (), **params: Any) -> str:
    """A mock's answer without concurrent requests."""
    wanted = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, **params}
    tokens = alone(FakeTokenizer().encode_prompt(prompt, history), **wanted).token_ids
    return FakeTokenizer().decode([token for token in tokens if token != EOS])


class HeldOpening:
    """Opens mocks when the test allows it."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.go = threading.Event()

    def __call__(self, settings: Any, progress: Any, **options: Any) -> Any:
        progress(2, 5, "decode, 2 users")
        self.arrived.set()
        assert self.go.wait(PATIENCE)
        return mock_llm(settings, **options)


def states(server: InProcessServer, **body: Any) -> dict[str, str]:
    """{name: state} of the repository index."""
    entries = post(server, "/v2/repository/index", body).json()
    assert all(set(entry) == {"name", "version", "state", "reason"} for entry in entries)
    return {entry["name"]: entry["state"] for entry in entries}


def generate(server: InProcessServer, prompt: str = "hello") -> Any:
    """Calls the generate extension."""
    return post(server, f"{PATH}/generate", {"prompt": prompt})
