"""MultiUserLLM: what people import."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Optional, Union

from glm_multiuser.answer import Answer, GenerationResult, Piece
from glm_multiuser.build import build_runner, load_weights, random_weights
from glm_multiuser.checkpoint import read_generation_defaults, read_model_config
from glm_multiuser.config import AnyModelConfig, EngineConfig
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.engine import Engine, SlotReport, StepReport
from glm_multiuser.engine.request import Event, Nobody, Request
from glm_multiuser.engine.runner import GraphRunner
from glm_multiuser.errors import GenerationError, InvalidParameterError, PromptTooLongError
from glm_multiuser.handle import AsyncHandle, Handle
from glm_multiuser.progress import Progress, show_progress
from glm_multiuser.sampling import SamplingParams
from glm_multiuser.tokenizers import AnswerReader, ChatTokenizer, load_tokenizer

User = Union[int, str, None]
Prompt = Union[str, Sequence[int]]
History = Sequence[Any]


@dataclass(frozen=True)
class EngineStats:
    """What an engine is and has done; see `MultiUserLLM.stats`."""

    users: int
    active_users: int
    idle_users: int
    waiting: int
    prompt_tokens: int
    tokens_generated: int
    steps: int
    mean_batch: float
    """Rows per decode step."""
    compiles: int
    compiles_after_ready: int
    compile_seconds: float
    start_seconds: float
    graph_seconds: float
    overhead_seconds: float
    """Time in steps that was not spent in graphs."""
    cache_bytes_per_user: int
    kernels: str
    """"native" or "portable"."""
    kernel_level: str
    """Of native kernels, the processor's instructions that they use; "" for others."""
    weight_dtype: str
    """Type of the matrices."""
    batch_invariant: bool
    """Whether a row's logits were bit for bit the same in every compiled batch at start-up."""


class MultiUserLLM:
    """One GLM model on one device, for many users at the same time.

    Made by `from_pretrained` or `from_config`. Every method may be called from any thread.
    """

    def __init__(
        self,
        runner: GraphRunner,
        config: EngineConfig,
        tokenizer: Optional[ChatTokenizer],
        default_params: SamplingParams,
        stop_token_ids: Sequence[int],
        start_seconds: float,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.default_params = default_params
        self.stop_token_ids = tuple(stop_token_ids)
        self._runner = runner
        self._start_seconds = start_seconds
        self._compiles_when_ready = runner.compiles
        self._engine = Engine(
            runner,
            config.users,
            config.max_queue,
            config.max_queue_per_user,
            reuse=config.cache_prompt and runner.model.config.is_causal,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: Union[str, Path],
        users: int = 8,
        seq_length: int = 512,
        device_target: str = "CPU",
        device_id: int = 0,
        dtype: Optional[str] = None,
        max_queue: int = 64,
        max_queue_per_user: int = 16,
        users_per_cell: Optional[int] = None,
        batch_invariant: bool = True,
        prefill_chunk: Optional[int] = None,
        cache_prompt: bool = True,
        kernels: str = "auto",
        weight_dtype: Optional[str] = None,
        progress: Optional[Progress] = None,
    ) -> MultiUserLLM:
        """Loads a checkpoint and compiles every graph; returns when nothing is left to compile.

        Args:
            folder: config.json, weights as safetensors, as pytorch_model*.bin or as MindFormers'
                .ckpt, and tokenizer files; without the last, prompts and answers are token ids.
            progress: called with (done, total, what); default: a progress bar on a terminal.

        The other arguments are those of `EngineConfig`.

        Raises:
            ConfigError: a setting that cannot work.
            CheckpointError: a file of the folder that is missing, broken, or of another model.
        """
        config = EngineConfig(
            users,
            seq_length,
            max_queue,
            max_queue_per_user,
            users_per_cell,
            batch_invariant,
            prefill_chunk,
            cache_prompt,
            dtype,
            kernels,
            weight_dtype,
            device_target,
            device_id,
        )
        folder = Path(folder)
        model_config = read_model_config(folder)
        tokenizer = load_tokenizer(folder)
        defaults = SamplingParams(**read_generation_defaults(folder))
        return cls._start(
            model_config, config, load_weights(folder, model_config), tokenizer, defaults, progress
        )

    @classmethod
    def from_config(
        cls,
        model_config: AnyModelConfig,
        seed: int = 0,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> MultiUserLLM:
        """A model of any shape with random weights and no tokenizer, for measurements and tests.

        Args:
            model_config: the shape.
            seed: of the weights.
            progress: as in `from_pretrained`.
            settings: the fields of `EngineConfig`.
        """
        return cls._start(
            model_config,
            EngineConfig(**settings),
            random_weights(seed),
            None,
            SamplingParams(),
            progress,
        )

    @classmethod
    def _start(
        cls,
        model_config: AnyModelConfig,
        config: EngineConfig,
        fill: Any,
        tokenizer: Optional[ChatTokenizer],
        default_params: SamplingParams,
        progress: Optional[Progress],
    ) -> MultiUserLLM:
        start = time.monotonic()
        with show_progress(progress) as report:
            report = _giving_way(report)
            runner = DEVICE_THREAD.call(lambda: build_runner(model_config, config, fill, report))
        stops = {*model_config.eos_token_ids, *(tokenizer.stop_token_ids if tokenizer else ())}
        seconds = time.monotonic() - start
        return cls(runner, config, tokenizer, default_params, sorted(stops), seconds)

    def submit(
        self,
        prompt: Prompt,
        params: Optional[SamplingParams] = None,
        user: User = None,
        history: History = (),
        reader: Optional[AnswerReader] = None,
    ) -> Handle:
        """Puts a request into the queue and returns at once.

        Args:
            prompt: a question, or token ids that are used as they are.
            params: default: those of the checkpoint's generation_config.json.
            user: whose slot; requests of one user run one after the other. None: nobody's, the
                request takes any slot.
            history: earlier rounds, (question, answer) pairs or {"role", "content"} messages.
            reader: of this answer alone, from `tokenizer.answer_reader(tools)`: text is its
                content then, and the result has its calls. None: for a question one without
                tools; for token ids none, so that text is as the model writes it.

        Raises:
            InvalidParameterError: a field out of its range.
            PromptTooLongError: no room for an answer.
            UserBusyError, QueueFullError: too many requests are waiting; nothing was lost.
            EngineClosedError: the engine takes no more requests.
        """
        token_ids = self.prompt_token_ids(prompt, history)
        reader = reader or self._reader_of(prompt)
        return self._submit(token_ids, params, user, wait=False, reader=reader)

    def asubmit(
        self,
        prompt: Prompt,
        params: Optional[SamplingParams] = None,
        user: User = None,
        history: History = (),
        reader: Optional[AnswerReader] = None,
    ) -> AsyncHandle:
        """`submit` for asyncio: no coroutine, but to be called where an event loop runs.

        Arguments and errors are those of `submit`.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        request = self._request(
            self.prompt_token_ids(prompt, history),
            params,
            user,
            lambda event: _deliver_to(loop, events, event),
        )
        answer = Answer(request, self.tokenizer, reader or self._reader_of(prompt))
        handle = AsyncHandle(answer, events, lambda: self._engine.cancel(request))
        self._engine.submit(request)
        return handle

    def stream_chat(
        self,
        query: Prompt,
        history: History = (),
        user: User = None,
        params: Optional[SamplingParams] = None,
    ) -> Handle:
        """Streams the answer: `for piece in llm.stream_chat(...)`. Raises as `submit` does."""
        return self.submit(query, params, user, history)

    def chat(
        self,
        query: str,
        history: History = (),
        user: User = None,
        params: Optional[SamplingParams] = None,
    ) -> tuple[str, list[Any]]:
        """-> the answer, and the history with this round added.

        Raises:
            GenerationError: the request failed. Otherwise as `submit`.
        """
        history = history or ()
        # Token ids, because `process_response` reads an answer as the model writes it.
        result = self.submit(self.prompt_token_ids(query, history), params, user).result()
        if result.finish_reason == "error":
            raise result.error or GenerationError("the request failed")
        answer = self.tokenizer.process_response(result.text) if self.tokenizer else result.text
        as_messages = any(isinstance(item, dict) for item in history)
        added: list[Any] = (
            [{"role": "user", "content": query}, {"role": "assistant", "content": answer}]
            if as_messages
            else [(query, answer)]
        )
        return answer, [*history, *added]

    async def astream_chat(
        self,
        query: Prompt,
        history: History = (),
        user: User = None,
        params: Optional[SamplingParams] = None,
    ) -> AsyncIterator[Piece]:
        """`stream_chat` for asyncio: pieces arrive without blocking the event loop."""
        # Left at once, and not some time later, when the consumer goes away.
        with self.asubmit(query, params, user, history) as handle:
            async for piece in handle:
                yield piece

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Union[SamplingParams, Sequence[SamplingParams], None] = None,
    ) -> list[GenerationResult]:
        """Answers many prompts, spread over the slots; results come in the order of the prompts.

        Args:
            prompts: questions or token ids.
            params: for all, or one for each.

        Raises:
            RequestError: a prompt or its parameters are refused; nothing runs then.
        """
        prompts = list(prompts)
        all_ids = [self.prompt_token_ids(prompt) for prompt in prompts]
        each = list(params) if isinstance(params, Sequence) else [params] * len(all_ids)
        if len(each) != len(all_ids):
            raise InvalidParameterError(
                f"params has {len(each)} entries for {len(all_ids)} prompts; it must have as many"
            )
        for token_ids, one in zip(all_ids, each):
            self._request(token_ids, one, None, deliver=lambda event: None)  # or it is refused
        handles = [
            self._submit(token_ids, one, None, wait=True, reader=self._reader_of(prompt))
            for prompt, token_ids, one in zip(prompts, all_ids, each)
        ]
        return [handle.result() for handle in handles]

    def resize(self, users: int, progress: Optional[Progress] = None) -> None:
        """Changes the number of slots while requests run: they pause, keep their caches, go on.

        Graphs are compiled again for the new layout. Idle users lose their slots.

        Raises:
            ConfigError: `users` out of range.
            EngineClosedError: the engine is closed.
            Exception: what MindSpore or `progress` raised, say for want of memory. The engine
                then goes on with as many slots as before, and no request is lost.
        """
        per_cell = self.config.users_per_cell
        if per_cell is not None and isinstance(users, int):
            per_cell = max(1, min(per_cell, users))
        config = replace(self.config, users=users, users_per_cell=per_cell)
        try:
            with show_progress(progress) as report:
                self._engine.resize(users, report)
            self.config = config
        finally:
            self._compiles_when_ready = self._runner.compiles

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters; cheap, and possible at any moment."""
        active, idle, waiting = self._engine.numbers()
        runner, counters = self._runner, self._engine.counters
        return EngineStats(
            users=self.config.users,
            active_users=active,
            idle_users=idle,
            waiting=waiting,
            prompt_tokens=counters.prompt_tokens,
            tokens_generated=counters.generated_tokens,
            steps=counters.steps,
            mean_batch=counters.decode_rows / max(1, counters.decode_steps),
            compiles=runner.compiles,
            compiles_after_ready=runner.compiles - self._compiles_when_ready,
            compile_seconds=runner.compile_seconds,
            start_seconds=self._start_seconds,
            graph_seconds=runner.graph_seconds,
            overhead_seconds=counters.step_seconds - runner.graph_seconds,
            cache_bytes_per_user=runner.cache_bytes_per_user,
            kernels=runner.kernels,
            kernel_level=runner.kernel_level,
            weight_dtype=runner.weight_dtype,
            batch_invariant=runner.batch_invariant,
        )

    def slots(self) -> list[SlotReport]:
        """What is in each slot, by its number."""
        return self._engine.slots()

    @property
    def failure(self) -> Optional[Exception]:
        """What made the engine close by itself; None as long as it has not.

        Every request was ended with an error, and no new one is taken: load the model again.
        """
        return self._engine.failure

    def on_step(self, hear: Callable[[StepReport], None]) -> None:
        """Calls `hear` after every step, on the device thread, instead of who heard so far.

        It must return at once and not raise: every user waits for it.
        """
        self._engine.on_step = hear

    def close(self, drain: float = 30.0) -> None:
        """Takes nothing new, gives running requests `drain` seconds to end, cancels the rest."""
        self._engine.close(drain)

    def __enter__(self) -> MultiUserLLM:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close(drain=30.0 if kind is None else 0.0)

    def _reader_of(self, prompt: Prompt) -> Optional[AnswerReader]:
        if self.tokenizer is None or not isinstance(prompt, str):
            return None
        return self.tokenizer.answer_reader()

    def _submit(
        self,
        token_ids: Sequence[int],
        params: Optional[SamplingParams],
        user: User,
        wait: bool,
        reader: Optional[AnswerReader] = None,
    ) -> Handle:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = self._request(token_ids, params, user, events.put)
        answer = Answer(request, self.tokenizer, reader)
        handle = Handle(answer, events, lambda: self._engine.cancel(request))
        self._engine.submit(request, wait)
        return handle

    def _request(
        self,
        token_ids: Sequence[int],
        params: Optional[SamplingParams],
        user: User,
        deliver: Callable[[Event], None],
    ) -> Request:
        params = params or self.default_params
        if params.stop and self.tokenizer is None:
            raise InvalidParameterError(
                f"stop is {params.stop!r}; without a tokenizer only stop_token_ids end an answer"
            )
        return Request(
            token_ids,
            params,
            _slot_name(user),
            self.stop_token_ids,
            self._room(token_ids),
            self._runner.vocab_size,
            deliver,
        )

    def prompt_token_ids(self, prompt: Prompt, history: History = ()) -> Sequence[int]:
        """The token ids that a question with its history is answered from.

        Args:
            prompt, history: as in `submit`, which calls this itself. Whoever must not wait for
                the tokenizer can call it elsewhere, and submit what it returned.

        Raises:
            InvalidParameterError: no text that this checkpoint can read, a token id out of range,
                or a history that is none.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidParameterError(
                    f"prompt is the text {prompt[:40]!r}, and this checkpoint has no tokenizer; "
                    "give token ids"
                )
            return self.tokenizer.encode_prompt(prompt, history)
        if history:
            raise InvalidParameterError("history needs a prompt that is text, not token ids")
        vocab_size = self._runner.vocab_size
        for position, token_id in enumerate(prompt):
            whole = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not whole or not 0 <= token_id < vocab_size:
                raise InvalidParameterError(
                    f"prompt[{position}] is {token_id!r}; token ids are whole numbers from 0 to "
                    f"{vocab_size - 1}"
                )
        return [int(token_id) for token_id in prompt]

    def chat_token_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[int]:
        """The token ids that a whole conversation is answered from; submit them.

        Args:
            messages: in OpenAI's shape: roles system (only first), user, assistant, perhaps with
                `tool_calls`, and tool; the last one awaits an answer.
            tools: what the answer may call, `{"type": "function", "function": {...}}`.

        Raises:
            InvalidParameterError: another order, role or shape, tools for a family that was not
                trained on them, or a checkpoint without a tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidParameterError(
                "messages need a tokenizer, and this checkpoint has none; submit token ids"
            )
        return self.tokenizer.encode_messages(messages, tools)

    def _room(self, token_ids: Sequence[int]) -> int:
        """How many tokens an answer to this prompt can have."""
        if not token_ids:
            raise InvalidParameterError("prompt has 0 tokens; it must have at least 1")
        room = self.config.seq_length - len(token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens; with seq_length {self.config.seq_length} "
                f"it may have at most {self.config.seq_length - 1}"
            )
        return room


def _giving_way(report: Progress) -> Progress:
    """Progress that lets the engines of other models run for as long as the last part took.

    So their users go on, at half their speed, while this model is loaded and compiled.
    """
    since = time.monotonic()

    def report_and_give_way(done: int, total: int, what: str) -> None:
        nonlocal since
        report(done, total, what)
        DEVICE_THREAD.give_way(time.monotonic() - since)
        since = time.monotonic()

    return report_and_give_way


def _slot_name(user: User) -> Hashable:
    if user is None:
        return Nobody()
    if isinstance(user, bool) or not isinstance(user, (int, str)):
        raise InvalidParameterError(f"user is {user!r}; it must be an int, a str or None")
    return user


def _deliver_to(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)
