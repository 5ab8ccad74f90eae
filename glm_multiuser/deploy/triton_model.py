"""The models of the Triton repository: Triton's requests, answered by one `MultiUserLLM`.

Triton's Python backend runs this in a process of its own, its stub, and calls `execute` with the
requests that have come. Each of their rows goes to the engine, and `execute` returns: the engine
batches token by token. A thread waits for each request's answer and sends it through the request's
response sender, so nobody waits for a longer answer than their own.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import triton_python_backend_utils as pb_utils

from glm_multiuser.answer import GenerationResult
from glm_multiuser.deploy.triton_door import PROBE
from glm_multiuser.deploy.triton_parameters import engine_arguments
from glm_multiuser.deploy.triton_reply import Reply
from glm_multiuser.errors import ConfigError, InvalidParameterError
from glm_multiuser.handle import Handle
from glm_multiuser.llm import MultiUserLLM
from glm_multiuser.server.ask import sampling_of
from glm_multiuser.server.kserve.asks import Question, fields_of, question_of, rows_of
from glm_multiuser.server.kserve.signature import INPUTS, Element
from glm_multiuser.server.logs import FIELDS, configure_logging

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.2
"""Between two looks for requests whose clients have gone."""


class TritonPythonModel:
    """What Triton's Python backend looks for; it calls the three methods, one at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the checkpoint that the model's configuration names.

        Raises:
            GLMMultiUserError: it cannot be opened; Triton refuses the load with its message.
        """
        config = json.loads(args["model_config"])
        arguments = engine_arguments(config.get("parameters", {}), Path(args["model_repository"]))
        self._streams = pb_utils.using_decoupled_model_transaction_policy(config)
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
        self._running: set[Reply] = set()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Starts every request and returns; their answers are sent when they are there."""
        for request in requests:
            self._start(request)

    def finalize(self) -> None:
        """Frees the weights; Triton calls this when all answers have been sent."""
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
            rows = [fields_of(row) for row in given]
            sampling = partial(sampling_of, self._llm.default_params)
            questions = [question_of(fields, sampling) for fields in rows]
            # Rows of one request do not wait for each other, so they run in any slots.
            session = rows[0].session if len(rows) == 1 else None
            for question in questions:
                ask = question.ask
                handles.append(self._llm.submit(ask.prompt, ask.params, session, ask.history))
        except Exception as error:
            for handle in handles:
                handle.close()
            Reply(sender).fail(error)
            return
        reply = Reply(sender, handles)
        self._running.add(reply)
        send = self._send_pieces if self._streams else self._send_whole
        # A line for every look of the supervisor would bury the others.
        log = _no_log if any(row.get(PROBE) for row in given) else self._log
        self._answering.submit(self._answer, send, reply, questions, handles, log)

    def _answer(
        self,
        send: Callable[[Reply, Sequence[Question], Sequence[Handle]], None],
        reply: Reply,
        questions: Sequence[Question],
        handles: Sequence[Handle],
        log: Callable[[Optional[GenerationResult]], None],
    ) -> None:
        try:
            send(reply, questions, handles)
        except Exception as error:
            reply.fail(error)
        finally:
            self._running.discard(reply)
            for handle in handles:
                handle.close()  # where another row has failed
                log(handle.finished)

    def _send_whole(
        self, reply: Reply, questions: Sequence[Question], handles: Sequence[Handle]
    ) -> None:
        results = [handle.result() for handle in handles]
        for result in results:
            if result.error is not None:
                raise result.error
        if any(result.finish_reason == "cancelled" for result in results):
            reply.say_cancelled()
            return
        reply.send(self._last(questions, results, [result.text for result in results]), last=True)

    def _send_pieces(
        self, reply: Reply, questions: Sequence[Question], handles: Sequence[Handle]
    ) -> None:
        (handle,) = handles
        for piece in handle:
            if piece.finish_reason is None and piece.text:
                reply.send({"response": [piece.text]}, last=False)
            last_text = piece.text
        result = handle.result()
        if result.finish_reason == "cancelled":
            reply.say_cancelled()
        else:
            reply.send(self._last(questions, [result], [last_text]), last=True)

    def _last(
        self,
        questions: Sequence[Question],
        results: Sequence[GenerationResult],
        texts: Sequence[str],
    ) -> dict[str, Sequence[str]]:
        """The outputs of a response that nothing follows."""
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
            for reply in tuple(self._running):
                reply.cancel_if_left()

    def _log(self, result: Optional[GenerationResult]) -> None:
        """How a row ended; not what was said."""
        fields: dict[str, Any] = {"model": self._name, "outcome": "error"}
        if result is not None:
            fields["outcome"] = result.finish_reason
            fields["prompt_tokens"] = result.usage.prompt_tokens
            fields["completion_tokens"] = result.usage.completion_tokens
        logger.info("generation ended", extra={FIELDS: fields})


def _no_log(result: Optional[GenerationResult]) -> None:
    """Nobody asked for this answer's sake."""


def _rows_of(request: Any) -> Iterator[dict[str, Any]]:
    """Inputs of every row, with the parameters of the request.

    Raises:
        InvalidParameterError: an input that is no text.
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
        raise InvalidParameterError(f"{name} has an element that is no UTF-8: {error}") from None
