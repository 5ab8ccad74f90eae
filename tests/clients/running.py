"""Runs third-party clients, each with its usual flow, and records what they send."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Optional
from unittest.mock import patch

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_multiuser import MultiUserLLM
from glm_multiuser.server.app import create_app
from glm_multiuser.server.service import Service
from tests.server.echoing import call, echo_llm, message
from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.process import ROOT

HERE = Path(__file__).parent
ENVIRONMENT = ROOT / ".venv-clients"
"""What `make clients` makes."""
MODEL = "echo"
QUESTION = call("get_time", city="London")
SECOND_QUESTION = message("And you?")
"""The model of these tests says what it is told, so the first one calls a tool."""
PATIENCE = 120.0

PYTHON_CLIENTS = {
    "litellm": "litellm",
    "langchain": "langchain",
    "langgraph": "langchain",
    "autogen": "autogen",
    "instructor": "instructor",
    "langchain_structured": "langchain",
}
"""And in which of its environments they are."""
CLIENTS = ("litellm", "langchain", "langgraph", "autogen", "openai_node", "java", "curl")
STRUCTURED = {
    "instructor": ["Day", "Note", "Day"],
    "langchain_structured": ["Day", "Note", "Day"],
    "ai_sdk": ["Day", "Note", "Day"],
}
"""Clients that ask for structured output, and the types of the answers that they make."""
NODE_PACKAGES = {"openai_node": "openai", "ai_sdk": "ai"}
NEEDS = {"java": "java", "curl": "curl", "openai_node": "node", "ai_sdk": "node"}
"""Programs that are not installed by `make clients`."""

ABOUT_THE_MACHINE = (
    *("host", "content-length", "x-stainless-os", "x-stainless-arch", "x-stainless-runtime"),
    *("x-stainless-runtime-version", "accept-encoding"),
)
"""Headers that are not recorded."""


def missing(client: str) -> Optional[str]:
    """What is needed to run a client and not there; None: nothing."""
    program = NEEDS.get(client)
    if program and not shutil.which(program):
        return f"{program} is not installed"
    if client in PYTHON_CLIENTS and not _python(client).exists():
        return "make clients installs it"
    package = NODE_PACKAGES.get(client)
    if package and not (ENVIRONMENT / "node_modules" / package).exists():
        return "make clients installs it"
    return None


def run_client(client: str, url: str) -> list[str]:
    """The answers to two questions, of which the first one needs a tool where there is one."""
    if client == "curl":
        return [_curl(url, SECOND_QUESTION), _curl(url, SECOND_QUESTION)]
    commands = {
        "openai_node": ["node", str(HERE / "openai_client.cjs")],
        "java": ["java", str(HERE / "JavaClient.java")],
    }
    if client in PYTHON_CLIENTS:
        commands[client] = [str(_python(client)), str(HERE / f"{client}_client.py")]
    first = SECOND_QUESTION if client == "java" else QUESTION
    said = _output([*commands[client], url, MODEL, first, SECOND_QUESTION])
    answers: list[str] = json.loads(said)
    return answers


def run_structured(client: str, url: str) -> list[str]:
    """The types of the answers of a client of `STRUCTURED`."""
    command = ["node", str(HERE / f"{client}_client.cjs")]
    if client in PYTHON_CLIENTS:
        command = [str(_python(client)), str(HERE / f"{client}_client.py")]
    answers: list[str] = json.loads(_output([*command, url, MODEL]))
    return answers


def _python(client: str) -> Path:
    return ENVIRONMENT / PYTHON_CLIENTS[client] / "bin" / "python"


def _curl(url: str, question: str) -> str:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": question}]})
    options = ["--silent", "--show-error", "--fail", "--http2"]
    options += ["--header", "Content-Type: application/json", "--data", body]
    said = _output(["curl", *options, f"{url}/v1/chat/completions"])
    content: str = json.loads(said)["choices"][0]["message"]["content"]
    return content


def _output(command: list[str]) -> str:
    ended = subprocess.run(
        command,
        env={
            **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
            "NODE_PATH": str(ENVIRONMENT / "node_modules"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it looks for prices outside
            "LITELLM_TELEMETRY": "False",
            "LANGSMITH_TRACING": "false",
        },
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )
    if ended.returncode:
        raise AssertionError(f"{command[:2]} failed:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout.strip().rpartition("\n")[2]


@contextmanager
def recording_server(
    open_llm: Callable[..., MultiUserLLM] = echo_llm,
) -> Iterator[tuple[InProcessServer, list[dict[str, Any]]]]:
    """A server, by default around a model that says what it is told, and the requests to it."""
    requests: list[dict[str, Any]] = []

    def create_recording_app(service: Service) -> ASGIApp:
        app = create_app(service)

        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            request = _described(scope)
            requests.append(request)

            async def receive_recorded() -> Message:
                received = await receive()
                request["body"] += received.get("body", b"").decode()
                return received

            await app(scope, receive_recorded, send)

        return record

    settings = mock_settings(users=2, names=(MODEL,))
    app = patch("glm_multiuser.server.run.create_app", create_recording_app)
    with app, in_process_server(settings, open_llm) as server:
        yield server, requests


def _described(scope: Scope) -> dict[str, Any]:
    headers = {
        name.decode(): value.decode()
        for name, value in scope["headers"]
        if name.decode() not in ABOUT_THE_MACHINE
    }
    return {
        "method": scope["method"],
        "path": scope["raw_path"].decode(),
        "headers": headers,
        "body": "",
    }
