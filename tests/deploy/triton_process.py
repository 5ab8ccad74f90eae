"""`glm-multiuser serve --backend triton` as a process, and how the tests ask it."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any, Callable, Optional, Union
from urllib.request import Request, urlopen

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult

from glm_multiuser.deploy.triton_server import children, find_stub
from tests.conformance.asking import PATIENCE, texts_of
from tests.server.process import SERVE, ServerProcess

WHOLE, STREAM = "chatglm", "chatglm_stream"
USERS = 4
SEQ_LENGTH = 2048
LONG = {"temperature": "100", "max_token": "1700"}
"""So hot that the answer is noise, which hardly ever comes to an end by itself."""
LONG_PARAMETERS = {"seed": 2}
TRIES = 20


class TritonProcess(ServerProcess):
    """The command on three free ports."""

    def __init__(self) -> None:
        sizes = ("--users", str(USERS), "--seq-length", str(SEQ_LENGTH))
        super().__init__(*sizes, command=(*SERVE, "--backend", "triton"))
        self.ports: dict[str, int] = self.events("ready")[0]

    @property
    def tritonserver(self) -> int:
        """Its process; another one after it was killed."""
        return children(self.pid)[0]

    def stub(self, model: str) -> Optional[int]:
        """The process that runs a model."""
        return find_stub(self.tritonserver, model)

    def grpc(self) -> InferenceServerClient:
        """A client, to be closed."""
        return InferenceServerClient(f"127.0.0.1:{self.ports['grpc']}")

    def wait_for_recovery(self, model: str, count: int) -> None:
        """Until a model, or the server, has recovered so many times.

        tritonserver seldom aborts when the process of a model is killed (docs/triton.md, Limits).
        """
        self._wait(lambda: self.recoveries(model) >= count)

    def recoveries(self, model: str) -> int:
        """How many times a model, or the server, has recovered so far."""
        recovered = [one for one in self.events("model recovered") if one["model"] == model]
        return len(recovered) + len(self.events("ready")) - 1

    def outcomes(self, model: str) -> list[str]:
        """How the requests of a model have ended so far."""
        ended = self.events("generation ended")
        return [one["outcome"] for one in ended if one["model"] == model]

    def wait_for_outcome(self, model: str, outcome: str, count: int) -> None:
        """Until so many requests of a model have ended so."""
        self._wait(lambda: self.outcomes(model).count(outcome) >= count)

    def wait_for_end(self, model: str, count: int) -> None:
        """Until so many requests of a model have ended."""
        self._wait(lambda: len(self.outcomes(model)) >= count)

    def cancels(self, model: str, ask_and_cancel: Callable[[], int], whole: int = 0) -> None:
        """Until `ask_and_cancel` has cancelled as many requests of a model as it returns; `whole`
        others end by themselves.

        An answer may be there before its cancellation: then all are asked for again.
        """
        for _ in range(TRIES):
            before = len(self.outcomes(model))
            count = ask_and_cancel()
            self.wait_for_end(model, before + count + whole)
            if self.outcomes(model)[before:].count("cancelled") == count:
                return
        raise AssertionError(f"in {TRIES} tries some answer came before its cancellation")


def grpc_inputs(prompt: str, **texts: str) -> list[InferInput]:
    """Inputs of one question, each of shape [1, 1]."""
    given = {name: values[0] for name, values in texts_of([prompt]).items()}
    inputs = []
    for name, text in {**given, **texts}.items():
        one = InferInput(name, [1, 1], "BYTES")
        one.set_data_from_numpy(np.array([[text.encode()]], np.object_))
        inputs.append(one)
    return inputs


def text_of(result: InferResult, name: str = "response") -> str:
    """The one element of an output."""
    return bytes(result.as_numpy(name)[0, 0]).decode()


class GrpcStream:
    """The responses to one question, over a stream of its own."""

    def __init__(
        self, client: InferenceServerClient, prompt: str, parameters: Any = None, **texts: str
    ) -> None:
        self._client = client
        self._arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: self._arrived.put((result, error)))
        client.async_stream_infer(
            STREAM,
            grpc_inputs(prompt, **texts),
            enable_empty_final_response=True,
            parameters=parameters,
        )

    def __iter__(self) -> Iterator[InferResult]:
        """Responses that have outputs, up to the last one."""
        last = False
        while not last:
            result, error = self._arrived.get(timeout=PATIENCE)
            if error is not None:
                raise error
            response = result.get_response()
            last = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield result

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.stop_stream()


def post(url: str, body: Union[dict[str, Any], None] = None) -> Any:
    """An open reply."""
    return urlopen(Request(url, json.dumps(body or {}).encode()), timeout=PATIENCE)


def events_of(reply: Any) -> Iterator[dict[str, Any]]:
    """The JSON of every event, as it comes."""
    for line in reply:
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])
