"""The models of the Triton repository: a `MultiUserLLM` in Triton's Python backend.

The backend runs this in a separate process, the stub, and calls `execute` with the requests that
have arrived. `execute` submits their rows to the engine and returns (continuous batching). A thread
per request waits for the result and sends it through the request's response sender, so no request
waits for a longer one.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import triton_python_backend_utils as pb_utils

from glm_multiuser.answer import GenerationResult
from glm_multiuser.deploy.triton_client import BUSY, PROBE
from glm_multiuser.deploy.triton_parameters import engine_arguments
from glm_multiuser.deploy.triton_response import TritonResponse
from glm_multiuser.errors import ConfigError, InvalidParameterError, QueueFullError
from glm_multiuser.garbage import leave_out_imports
from glm_multiuser.handle import Handle
from glm_multiuser.llm import MultiUserLLM
from glm_multiuser.server.kserve.questions import Question, fields_of, question_of, rows_of
from glm_multiuser.server.kserve.signature import INPUTS, Element
from glm_multiuser.server.logs import FIELDS, configure_logging

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.2
"""Interval of checks for disconnected clients."""


class TritonPythonModel:
    """The class that Triton's Python backend expects; its methods are called one at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the checkpoint named in the model's configuration.

        Raises:
            GLMMultiUserError: it cannot be loaded; Triton rejects the load with this message.
        """
        config = json.loads(args["model_config"])
        arguments = engine_arguments(config.get("parameters", {}), Path(args["model_repository"]))
        self._streams = pb_utils.using_decoupled_model_transaction_policy(config)
        leave_out_imports()
        self._llm = MultiUserLLM.from_pretrained(**arguments)
        if self._llm.tokenizer is None:
            raise ConfigError(
                f"parameters.checkpoint is {arguments['folder']}, which has no tokenizer files; "
                "this model takes text"
            )
        configure_logging(as_json=True)
        self._name = args["model_name"]
        engine = self._llm.config
        self._answering = ThreadPoolExecutor(engine.users + engine.max_queue, "answer")
        self._running: set[TritonResponse] = set()
        self._steps_at_probe = 0
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Submits every request and returns; other threads send the responses."""
        for request in requests:
            self._start(request)

    def finalize(self) -> None:
        """Frees the weights; Triton calls this after all responses have been sent."""
        self._closing.set()
        self._llm.close(drain=0.0)
        self._answering.shutdown()
        self._watcher.join()

    def _start(self, request: Any) -> None:
        sender = request.get_response_sender()
        handles: list[Handle] = []
        try:
            if self._llm.failure is not None:
                raise self._llm.failure
            given = list(_rows_of(request))
            is_probe = any(row.get(PROBE) for row in given)
            if is_probe and self._is_busy():
                raise QueueFullError(BUSY)
            rows = [fields_of(row) for row in given]
            questions = [question_of(fields, self._llm.default_params) for fields in rows]
            # Rows of one request run concurrently; in the slot of a session, they could not.
            session = rows[0].session if len(rows) == 1 else None
            for question in questions:
                wanted = question.request
                handle = self._llm.submit(
                    wanted.prompt, user=session, history=wanted.history, params=wanted.params
                )
                handles.append(handle)
        except Exception as error:
            for handle in handles:
                handle.close()
            TritonResponse(sender).fail(error)
            return
        response = TritonResponse(sender, handles)
        self._running.add(response)
        self._answering.submit(self._answer, response, questions, handles, is_probe)

    def _is_busy(self) -> bool:
        """Whether a probe would wait for a slot, and there were steps since the last one."""
        stats = self._llm.stats()
        progressed = stats.steps > self._steps_at_probe
        self._steps_at_probe = stats.steps
        return progressed and stats.active_users == stats.users

    def _answer(
        self,
        response: TritonResponse,
        questions: Sequence[Question],
        handles: Sequence[Handle],
        is_probe: bool,
    ) -> None:
        send = self._send_pieces if self._streams else self._send_whole
        try:
            send(response, questions, handles)
        except Exception as error:
            response.fail(error)
        finally:
            self._running.discard(response)
            for handle in handles:
                handle.close()  # when another row has failed
                if not is_probe:  # the supervisor's probes would flood the log
                    self._log(handle.finished)

    def _send_whole(
        self, response: TritonResponse, questions: Sequence[Question], handles: Sequence[Handle]
    ) -> None:
        results = [handle.result() for handle in handles]
        for result in results:
            if result.error is not None:
                raise result.error
        if any(result.finish_reason == "cancelled" for result in results):
            response.send_cancelled()
            return
        response.send(
            self._last(questions, results, [result.text for result in results]), last=True
        )

    def _send_pieces(
        self, response: TritonResponse, questions: Sequence[Question], handles: Sequence[Handle]
    ) -> None:
        (handle,) = handles
        for piece in handle:
            if piece.finish_reason is None and piece.text:
                response.send({"response": [piece.text]}, last=False)
            last_text = piece.text
        result = handle.result()
        if result.finish_reason == "cancelled":
            response.send_cancelled()
        else:
            response.send(self._last(questions, [result], [last_text]), last=True)

    def _last(
        self,
        questions: Sequence[Question],
        results: Sequence[GenerationResult],
        texts: Sequence[str],
    ) -> dict[str, Sequence[str]]:
        """Returns the outputs of the last response."""
        pairs = zip(questions, results)
        outputs: dict[str, Sequence[str]] = {
            "response": texts,
            "history": [question.history_with(result.text) for question, result in pairs],
        }
        if self._streams:
            outputs["finish_reason"] = [result.finish_reason or "" for result in results]
        return outputs

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            for response in tuple(self._running):
                response.cancel_if_disconnected()

    def _log(self, result: Optional[GenerationResult]) -> None:
        """Logs how a row ended, without its text."""
        fields: dict[str, Any] = {"model": self._name, "outcome": "error"}
        if result is not None:
            fields["outcome"] = result.finish_reason
            fields["prompt_tokens"] = result.usage.prompt_tokens
            fields["completion_tokens"] = result.usage.completion_tokens
        logger.info("generation ended", extra={FIELDS: fields})


def _rows_of(request: Any) -> Iterator[dict[str, Any]]:
    """Yields the inputs of each row, merged with the parameters of the request.

    Raises:
        InvalidParameterError: an input that is not UTF-8.
    """
    parameters = json.loads(request.parameters() or "{}")
    if request.correlation_id():
        parameters["sequence_id"] = request.correlation_id()
    tensors = {}
    for spec in INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
        if tensor is not None:
            tensors[spec.name] = [
                _element(spec.name, value) for value in tensor.as_numpy().reshape(-1).tolist()
            ]
    for row in rows_of(tensors):
        yield {**parameters, **row}


def _element(name: str, value: Any) -> Element:
    if isinstance(value, int):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidParameterError(
            f"{name} has an element that is no UTF-8: {error}", field=name
        ) from None
