"""Generation methods: streaming requests, chat, batches of prompts, and asyncio variants."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional, Union

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.config import EngineConfig
from glm_multiuser.deprecation import keyword_only_since
from glm_multiuser.engine.engine import Engine
from glm_multiuser.engine.request import Event, Request
from glm_multiuser.errors import (
    EngineClosedError,
    GenerationError,
    InvalidParameterError,
    RequestError,
    check_kind,
    shown,
)
from glm_multiuser.handle import AsyncHandle, Handle
from glm_multiuser.input_processor import History, InputProcessor, Params, Prompt, User
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.structured.matcher import GrammarMatcher
from glm_multiuser.tokenizers import AnswerReader
from glm_multiuser.worker_threads import run_on


class GenerationMixin(InputProcessor):
    """The generation methods of `MultiUserLLM`, which submit requests and return handles."""

    _engine: Engine
    config: EngineConfig

    @keyword_only_since("0.2", "params", "user", "history", "reader")
    def submit(
        self,
        prompt: Prompt,
        *,
        user: User = None,
        history: History = (),
        params: Params = None,
        reader: Optional[AnswerReader] = None,
        group: str = "",
        owner: bytes = b"",
        matcher: Optional[GrammarMatcher] = None,
    ) -> Handle:
        """Adds a request to the queue and returns immediately.

        Args:
            prompt: a question, or token ids that are used unchanged.
            user: owner of the slot; requests of one user run sequentially. None: anonymous, any
                slot.
            history: earlier rounds, (question, answer) pairs or {"role", "content"} messages.
            params: default: those of the checkpoint's generation_config.json.
            reader: for this answer only, from `tokenizer.answer_reader(tools)`: text is then the
                content, and the result has the tool calls. None: for a question, a reader without
                tools; for token ids, none, so that text is the model's raw output.
            group: a tenant. Groups share slots and queue: the next slot goes to the group that has
                the fewest, and a group may always use its share of `max_queue`.
            owner: a secret of the tenant, such as a digest of its API key. Slots and sessions on
                disk belong to owner and user together, so equal names of two owners are two users.
            matcher: of the grammar in `params`, from `compile_grammar`, for this request only;
                None: compiled here.

        Raises:
            InvalidParameterError: a field out of its range, or an unsupported grammar.
            PromptTooLongError: no room for an answer.
            UserBusyError, QueueFullError: too many requests are waiting; nothing was lost.
            EngineClosedError: the engine accepts no more requests.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request, answer = self._request(
            prompt, events.put, user, history, params, reader, group, owner, matcher
        )
        return Handle(answer, events, self._enqueue(request, matcher))

    @keyword_only_since("0.2", "params", "user", "history", "reader")
    def asubmit(
        self,
        prompt: Prompt,
        *,
        user: User = None,
        history: History = (),
        params: Params = None,
        reader: Optional[AnswerReader] = None,
        group: str = "",
        owner: bytes = b"",
        matcher: Optional[GrammarMatcher] = None,
    ) -> AsyncHandle:
        """`submit` for asyncio: not a coroutine, but needs a running event loop.

        Arguments and errors are those of `submit`. Grammars take milliseconds to compile; call
        `compile_grammar` in another thread to avoid blocking the loop.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        request, answer = self._request(
            prompt, deliver, user, history, params, reader, group, owner, matcher
        )
        return AsyncHandle(answer, events, self._enqueue(request, matcher))

    @keyword_only_since("0.2", "history", "user", "params")
    def stream_chat(
        self, prompt: Prompt, *, user: User = None, history: History = (), params: Params = None
    ) -> Handle:
        """Streams the answer: `for piece in llm.stream_chat(...)`. Raises as `submit` does."""
        return self.submit(prompt, user=user, history=history, params=params)

    @keyword_only_since("0.2", "history", "user", "params")
    def chat(
        self, prompt: Prompt, *, user: User = None, history: History = (), params: Params = None
    ) -> tuple[str, list[Any]]:
        """Returns the answer, and the history with this round added.

        Raises:
            GenerationError: the request failed.
            EngineClosedError: the engine is closed, or was closed before the answer was complete.
                Otherwise as `submit`.
        """
        history = history or ()
        # Token ids, because `process_response` needs the model's raw output. Stop strings apply to
        # the content, which ChatGLM3 and GLM-4 write after a line break.
        token_ids = self.prompt_token_ids(prompt, history)
        params = self._params_of(params)
        reader = self._reader_of(prompt) if params.stop else None
        result = self.submit(token_ids, user=user, params=params, reader=reader).result()
        if result.finish_reason == "error":
            raise result.error or GenerationError("the request failed")
        if result.finish_reason == "cancelled":
            raise EngineClosedError("the engine was closed before the answer was complete")
        answer = result.text
        # Processing could violate the grammar.
        if self.tokenizer and params.grammar is None:
            answer = self.tokenizer.process_response(answer)
        added: list[Any] = [(prompt, answer)]
        if any(isinstance(item, dict) for item in history):
            added = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return answer, [*history, *added]

    @keyword_only_since("0.2", "history", "user", "params")
    async def astream_chat(
        self, prompt: Prompt, *, user: User = None, history: History = (), params: Params = None
    ) -> AsyncIterator[Piece]:
        """`stream_chat` for asyncio: pieces arrive without blocking the event loop."""
        # Cancels the request as soon as the consumer goes away.
        with self.asubmit(prompt, user=user, history=history, params=params) as handle:
            async for piece in handle:
                yield piece

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Union[SamplingParams, Sequence[SamplingParams], None] = None,
    ) -> list[GenerationResult]:
        """Answers many prompts, spread over the slots; returns results in the order of prompts.

        Args:
            prompts: questions or token ids.
            params: for all, or one for each.

        Raises:
            RequestError: a prompt or its parameters are invalid; then none is run.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise InvalidParameterError(
                f"prompts is {shown(prompts)}; it must be a list of texts or of token ids"
            )
        prompts = list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidParameterError(
                f"params has {len(each)} entries for {len(prompts)} prompts; it must have as many",
                field="params",
            )
        made = []
        for place, (prompt, one) in enumerate(zip(prompts, each)):
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            try:
                made.append((events, *self._request(prompt, events.put, params=one)))
            except RequestError as error:
                if error.field == "prompt":
                    error.args = (f"prompts[{place}]: {error}",)
                raise
        # Only now, because one invalid prompt rejects all.
        handles: list[Handle] = []
        readers = ThreadPoolExecutor(self.config.users, "reader")
        try:
            for events, request, answer in made:
                handles.append(Handle(answer, events, self._enqueue(request, wait=True)))
                if request.params.stop:
                    # Only its reader finds a stop string, and ends the request there.
                    run_on(readers, handles[-1].result)
            readers.shutdown()
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        finally:
            readers.shutdown()

    def check_queue(self, group: str = "") -> None:
        """Raises what `submit` would raise for a full queue or a closed engine.

        Call it before work that a rejection would waste, such as compiling a grammar.

        Args:
            group: as in `submit`.

        Raises:
            QueueFullError: too many requests are waiting.
            EngineClosedError: the engine accepts no more requests.
        """
        self._engine.check_queue(check_kind("group", group, str))

    def _enqueue(
        self, request: Request, matcher: Optional[GrammarMatcher] = None, wait: bool = False
    ) -> Callable[[], None]:
        """Returns the request's cancel function. With `wait`, blocks until the queue has room."""
        self._engine.submit(request, wait)
        if matcher is not None:
            matcher.taken = True
        return lambda: self._engine.cancel(request)
