"""A stand-in for `MultiUserLLM` that answers at once, so that the commands are tested in seconds.

A known question gets its known answer, four characters to a token; any other its own text
backwards, one character to a token; token ids are counted on from the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Optional, Union

from glm_multiuser.cli.questions import KNOWN
from glm_multiuser.errors import GenerationError, InvalidParameterError, PromptTooLongError
from glm_multiuser.structured.grammar import Grammar

Prompt = Union[str, Sequence[int]]

WITH_FAKE_MODEL = """
from glm_multiuser.cli import loading, main
from tests.cli.fake import FakeLLM
loading.llm_class = lambda: FakeLLM
main()
"""
"""The command as a program of its own, with this model."""


@dataclass(frozen=True)
class Params:
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: Optional[int] = None
    ignore_eos: bool = False
    logprobs: Optional[int] = None
    cache_prompt: bool = True
    stop: tuple[str, ...] = ()
    grammar: Optional[Grammar] = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InvalidParameterError(f"temperature is {self.temperature}", "temperature")


@dataclass(frozen=True)
class Piece:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Optional[str] = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Result:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: Any = None
    prompt_logprobs: Any = None
    error: Optional[Exception] = None


@dataclass(frozen=True)
class Stats:
    users: int = 8
    tokens_generated: int = 0
    mean_batch: float = 0.0
    graph_seconds: float = 0.0
    overhead_seconds: float = 0.0
    start_seconds: float = 2.5
    compile_seconds: float = 1.5
    compiles: int = 6
    compiles_after_ready: int = 0
    batch_invariant: Optional[bool] = True
    kernels: str = "native"
    kernel_level: str = "avx2"
    weight_dtype: str = "float32"
    cache_dtype: str = "float32"


class Handle:
    def __init__(self, pieces: list[Piece], prompt_tokens: int) -> None:
        self.pieces = pieces
        self.prompt_tokens = prompt_tokens

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def result(self, timeout: Optional[float] = None) -> Result:
        token_ids = tuple(token for piece in self.pieces for token in piece.token_ids)
        return Result(
            "".join(piece.text for piece in self.pieces),
            token_ids,
            self.pieces[-1].finish_reason or "stop",
            Usage(self.prompt_tokens, len(token_ids)),
        )


class FakeLLM:
    """The part of the public API that the commands use."""

    opened: ClassVar[list[FakeLLM]] = []
    final_stats: ClassVar[Stats] = Stats()
    wrong_for: ClassVar[tuple[str, ...]] = ()
    """Users who get another answer every second time that they ask the same."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.closed = False
        self.asked: list[tuple[str, Optional[str], list[tuple[str, str]]]] = []
        self.tokens_generated = 0
        FakeLLM.opened.append(self)

    @classmethod
    def from_pretrained(cls, folder: str, **settings: Any) -> FakeLLM:
        return cls(folder=folder, **settings)

    @classmethod
    def from_config(cls, model_config: Any, **settings: Any) -> FakeLLM:
        return cls(model_config=model_config, **settings)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def pieces(self, prompt: Prompt, params: Any, wrong: bool = False) -> list[Piece]:
        if isinstance(prompt, str) and prompt in dict(KNOWN):
            answer = dict(KNOWN)[prompt]
            texts = [answer[start : start + 4] for start in range(0, len(answer), 4)]
        elif isinstance(prompt, str):
            texts = list(reversed(prompt))
        else:
            texts = [chr(prompt[-1] + step) for step in range(1, params.max_tokens + 1)]
        reason = "length" if params.ignore_eos or len(texts) > params.max_tokens else "stop"
        pieces = [Piece(text, (ord(text[0]),)) for text in texts[: params.max_tokens]]
        last = pieces[-1].token_ids[0] + wrong
        pieces[-1] = replace(pieces[-1], token_ids=(last,), finish_reason=reason)
        self.tokens_generated += len(pieces)
        return pieces

    def prompt_token_ids(self, prompt: str) -> list[int]:
        return [ord(one) for one in prompt]

    def stream_chat(
        self,
        prompt: str,
        *,
        user: Optional[str] = None,
        history: Sequence[tuple[str, str]] = (),
        params: Any = None,
    ) -> Iterator[Piece]:
        asked = (prompt, user, list(history))
        wrong = user in self.wrong_for and self.asked.count(asked) % 2 == 1
        self.asked.append(asked)
        for piece in self.pieces(prompt, params, wrong):
            if prompt == "interrupt me" and piece.text == "r":
                raise KeyboardInterrupt
            if prompt == "fail":
                raise GenerationError("logits of this request are not finite")
            yield piece

    def submit(
        self,
        prompt: Prompt,
        *,
        user: Optional[str] = None,
        history: Sequence[tuple[str, str]] = (),
        params: Any = None,
    ) -> Handle:
        self.asked.append((str(prompt), user, list(history)))
        if len(prompt) > 400:
            raise PromptTooLongError(f"the prompt has {len(prompt)} tokens; the limit is 400")
        return Handle(self.pieces(prompt, params), len(prompt))

    def generate(self, prompts: Sequence[Prompt], params: Sequence[Any]) -> list[Result]:
        return [self.submit(prompt, params=one).result() for prompt, one in zip(prompts, params)]

    def stats(self) -> Stats:
        users = self.settings.get("users", 8)
        return replace(
            self.final_stats,
            users=users,
            tokens_generated=self.tokens_generated,
            mean_batch=float(users),
            graph_seconds=0.9 * self.tokens_generated,
            overhead_seconds=0.1 * self.tokens_generated,
        )
