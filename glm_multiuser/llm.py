"""MultiUserLLM: the public class."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from threading import TIMEOUT_MAX, Thread
from typing import Any, Optional, Union

from glm_multiuser.build import build_runner
from glm_multiuser.checkpoint import read_end_ids, read_generation_defaults, read_model_config
from glm_multiuser.checkpoint.gguf.find import find_gguf
from glm_multiuser.checkpoint.hub import local_path
from glm_multiuser.config import EngineConfig
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.engine import Engine, SlotReport
from glm_multiuser.engine.graph_runner import GraphRunner
from glm_multiuser.engine.request import holder_of
from glm_multiuser.engine.step_loop import StepReport
from glm_multiuser.errors import CheckpointError, InvalidParameterError, SessionError, check_kind
from glm_multiuser.generation import GenerationMixin
from glm_multiuser.input_processor import User, check_owner, slot_name
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.progress import Progress, show_progress
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.sessions.file import read_file, write_file
from glm_multiuser.sessions.identity import Identity
from glm_multiuser.sessions.opening import open_store
from glm_multiuser.sessions.session import SessionInfo
from glm_multiuser.settings import takes
from glm_multiuser.stats import EngineStats
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from glm_multiuser.weights import WeightSource, load_weights, random_weights


class MultiUserLLM(GenerationMixin):
    """One language model on one device, shared by many users.

    Create it with `from_pretrained` or `from_config`. All methods are thread-safe.

    Attributes:
        max_length: maximum of prompt and answer tokens together: `seq_length`, or what fits in
            `cache_memory`.
    """

    def __init__(
        self,
        runner: GraphRunner,
        config: EngineConfig,
        tokenizer: Optional[ChatTokenizer],
        default_params: SamplingParams,
        stop_token_ids: Sequence[int],
        start_seconds: float,
        saving: Optional[Thread] = None,
    ) -> None:
        self.config = config
        self._users_per_cell = config.users_per_cell
        """As configured; the value in `config` never exceeds its users."""
        self._runner = runner
        self._start_seconds = start_seconds
        self._saving = saving
        self._compiles_when_ready = runner.compiles
        self._known_fingerprint: Optional[str] = None
        is_causal = runner.model.config.is_causal
        self._engine = Engine(
            runner,
            config.users,
            config.max_queue,
            config.max_queue_per_user,
            reuse=config.cache_prompt and is_causal,
            cache_limit=config.cache_limit,
            store=open_store(config, self._fingerprint, is_causal),
        )
        max_length = self._engine.longest(config.seq_length)
        full = max_length == config.seq_length
        super().__init__(
            tokenizer,
            default_params,
            stop_token_ids,
            runner.vocab_size,
            is_causal,
            max_length,
            f"seq_length {config.seq_length}" if full else f"cache_memory {config.cache_memory}",
        )

    @classmethod
    @takes(EngineConfig)
    def from_pretrained(
        cls,
        folder: Union[str, Path],
        *positional: Any,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> MultiUserLLM:
        """Loads a checkpoint, and compiles every graph before it returns.

        Args:
            folder: with config.json, weights (safetensors, pytorch_model*.bin or MindFormers'
                .ckpt) and tokenizer files; without the last, prompts and answers are token ids.
                Or a GGUF file, any part of a split one, or a folder with one. If the path does
                not exist, a model on Hugging Face, owner/name or owner/name/file.gguf, or with the
                prefix modelscope: on ModelScope.
            progress: called with (done, total, what); default: a progress bar on a terminal.

        Raises:
            ConfigError: an invalid setting.
            CheckpointError: a file that is missing, broken, or of another model; a model that
                cannot be downloaded.
        """
        config = EngineConfig(*positional, **settings)
        folder = local_path(folder, config.check_fits)
        model_config = read_model_config(folder)
        tokenizer = load_tokenizer(folder)
        vocab_size = model_config.vocab_size
        ends = tokenizer.stop_token_ids if tokenizer else read_end_ids(folder, vocab_size)
        if not (ends or model_config.eos_token_ids):
            raise CheckpointError(
                f"{folder} has no id that ends an answer; config.json or generation_config.json "
                "must have an eos_token_id, or tokenizer_config.json an eos_token"
            )
        defaults = _default_params(folder)
        source = load_weights(folder, model_config)
        return cls._start(model_config, config, source, progress, tokenizer, ends, defaults)

    @classmethod
    @takes(EngineConfig)
    def from_config(
        cls,
        model_config: AnyModelConfig,
        seed: int = 0,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> MultiUserLLM:
        """Creates a model with random weights and no tokenizer, for benchmarks and tests.

        `seed` is for the weights; `progress` is as in `from_pretrained`.
        """
        return cls._start(model_config, EngineConfig(**settings), random_weights(seed), progress)

    @classmethod
    def _start(
        cls,
        model_config: AnyModelConfig,
        config: EngineConfig,
        source: WeightSource,
        progress: Optional[Progress],
        tokenizer: Optional[ChatTokenizer] = None,
        ends: Sequence[int] = (),
        defaults: Optional[SamplingParams] = None,
    ) -> MultiUserLLM:
        start = time.monotonic()
        with show_progress(progress) as report:
            report = DEVICE_THREAD.yielding(report)
            runner, saving = DEVICE_THREAD.call(
                lambda: build_runner(model_config, config, source, report)
            )
        stops = sorted({*model_config.eos_token_ids, *ends})
        seconds = time.monotonic() - start
        return cls(runner, config, tokenizer, defaults or SamplingParams(), stops, seconds, saving)

    def resize(self, users: int, progress: Optional[Progress] = None) -> None:
        """Changes the number of slots; running requests pause, keep their caches, and resume.

        Graphs are recompiled for the new layout. Idle users lose their slots.

        Raises:
            ConfigError: `users` is out of range.
            EngineClosedError: the engine is closed.
            Exception: what MindSpore or `progress` raised, for example out of memory. The engine
                then continues with its old size, and no request is lost.
        """
        per_cell = self._users_per_cell
        if per_cell is not None and isinstance(users, int):
            per_cell = max(1, min(per_cell, users))
        config = replace(self.config, users=users, users_per_cell=per_cell)

        def on_resized() -> None:
            self.config = config

        try:
            with show_progress(progress) as report:
                self._engine.resize(users, report, on_resized)
        finally:
            self._compiles_when_ready = self._runner.compiles

    def stats(self) -> EngineStats:
        """Returns a snapshot of the engine's counters; cheap, and callable at any time."""
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
            cache_reserved_bytes=runner.cache_bytes_per_user * self.config.users,
            cache_resident_bytes=self._engine.resident_bytes(),
            kernels=runner.kernels,
            kernel_level=runner.kernel_level,
            weight_dtype=runner.weight_dtype,
            cache_dtype=runner.cache_dtype,
            prefill_chunk=runner.chunk_length.longest,
            prefill_chunk_beside=runner.chunk_length.beside,
            batch_invariant=runner.batch_invariant,
            sessions=self._engine.store.counts(),
        )

    def save_session(
        self, user: Union[int, str], path: Union[str, Path], *, owner: bytes = b""
    ) -> None:
        """Writes a user's session to a file: token ids and their KV cache.

        For ChatGLM-6B only token ids are written: its prompts have bidirectional attention, so it
        cannot reuse a KV cache.

        Args:
            user, owner: as in `submit`; none of the user's requests may be running.
            path: of the file, which only its owner may read.

        Raises:
            InvalidParameterError: an invalid user or owner.
            UserBusyError, EngineClosedError: a request of the user is running; `close` was called.
            SessionError: this user has no session, the file cannot be written, or `cache_prompt` is
                False.
        """
        holder, identity = self._session_of(user, owner)
        self._check_reuse()
        session = self._engine.export(holder) or self._engine.store.read(identity)
        if session is None:
            raise SessionError(f"user {user!r} has no session: no slot holds it, and no store")
        try:
            write_file(_path_of(path), session, self._fingerprint(), "")
        except (OSError, ValueError) as error:  # a name with the character NUL
            raise SessionError(f"the session is not written to {path}: {error}") from error

    def load_session(
        self, user: Union[int, str], path: Union[str, Path], *, owner: bytes = b""
    ) -> None:
        """Loads a session that `save_session` wrote, of this user or another, for a user.

        The user's next prompt skips the common prefix. Until then the session stays in memory, and
        does not count towards `session_memory`.

        Args:
            user, owner: as in `submit`; none of the user's requests may be running.
            path: of the file.

        Raises:
            InvalidParameterError: an invalid user or owner.
            UserBusyError, EngineClosedError: a request of the user is running; `close` was called.
            SessionError: the file is missing or damaged, or belongs to another model, other
                weights, or settings that give different bits; or `cache_prompt` is False.
        """
        holder, identity = self._session_of(user, owner)
        self._check_reuse()
        try:
            session = read_file(_path_of(path), self._fingerprint())
        except (OSError, ValueError) as error:
            raise SessionError(f"no session is read from {path}: {error}") from error
        self._engine.forget(holder, only_idle=True)
        self._engine.store.insert(identity, session)

    def forget(self, user: Union[int, str], *, owner: bytes = b"") -> None:
        """Drops a user's prefix cache, and its session in memory and on disk. A running request
        continues; nothing of it is kept at its end.

        Args:
            user, owner: as in `submit`.

        Raises:
            InvalidParameterError: an invalid user or owner.
            EngineClosedError: sessions are kept on disk, and the engine is closed.
            SessionError: a file could not be removed.
        """
        holder, identity = self._session_of(user, owner)
        self._engine.forget(holder)
        try:
            self._engine.store.forget(identity)
        except OSError as error:
            raise SessionError(f"the session of user {user!r} is not removed: {error}") from error

    def sessions(self, owner: bytes = b"") -> list[SessionInfo]:
        """Lists the sessions of a tenant's users in idle slots, in memory, and on disk.

        Args:
            owner: as in `submit`.

        Raises:
            InvalidParameterError: `owner` is not bytes.
        """
        check_owner(owner)
        return self._engine.session_infos(owner)

    def _session_of(self, user: User, owner: bytes) -> tuple[Hashable, Identity]:
        """Returns the slot's holder, and the session's identity."""
        if user is None:
            raise InvalidParameterError("user is None; it must be an int or a str", "user")
        check_owner(owner)
        name = slot_name(user)
        return holder_of(name, owner), self._engine.store.identity(owner, name)

    def _check_reuse(self) -> None:
        if not self.config.cache_prompt:
            raise SessionError("cache_prompt is False: no session is saved or loaded")

    def _fingerprint(self) -> str:
        """Identifies what saved KV caches depend on; the first call reads every weight."""
        if self._known_fingerprint is None:
            self._known_fingerprint = DEVICE_THREAD.call(self._runner.fingerprint)
        return self._known_fingerprint

    def slots(self) -> list[SlotReport]:
        """Returns the state of each slot, by its number."""
        return self._engine.slots()

    @property
    def failure(self) -> Optional[Exception]:
        """The error that closed the engine; None if there was none.

        After it, every request has ended with an error and new ones are rejected: reload the model.
        """
        return self._engine.failure

    def on_step(self, callback: Callable[[StepReport], None]) -> None:
        """Calls `callback` after every step, on the device thread; replaces an earlier one.

        It must return immediately and not raise, because all users wait for it.
        """
        self._engine.on_step = check_kind("callback", callback, Callable)

    def close(self, drain: float = 30.0) -> None:
        """Graceful shutdown: rejects new requests and cancels the rest after `drain` seconds.

        Also waits up to `drain` seconds for packed weights that are still being written.
        """
        self._engine.close(drain)
        if self._saving is not None:
            self._saving.join(min(drain, TIMEOUT_MAX))

    def __enter__(self) -> MultiUserLLM:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *error: object) -> None:
        self.close(drain=30.0 if kind is None else 0.0)


def _path_of(path: Any) -> Path:
    """Raises InvalidParameterError unless `path` is a path."""
    return Path(check_kind("path", path, str, PathLike))


def _default_params(folder: Path) -> SamplingParams:
    try:
        return SamplingParams(**read_generation_defaults(folder))
    except InvalidParameterError as error:
        where = find_gguf(folder) or f"generation_config.json in {folder}"
        raise CheckpointError(f"{where}: {error}") from error
