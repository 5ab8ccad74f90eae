"""Turns prompts into requests: token ids, limits, grammar. Runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from threading import Lock
from typing import Any, Callable, Optional, Union

from glm_multiuser.answer import AnswerCollector
from glm_multiuser.engine.request import AnonymousUser, Event, Request
from glm_multiuser.errors import InvalidParameterError, PromptTooLongError, check_kind, shown
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.structured.compiler import GrammarCompiler
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.structured.matcher import GrammarMatcher
from glm_multiuser.token_ids import TokenIds, check_token_ids
from glm_multiuser.tokenizers import AnswerReader, ChatTokenizer

User = Union[int, str, None]
Prompt = Union[str, Sequence[int]]
History = Sequence[Any]
Params = Optional[SamplingParams]

USER_BITS_MAX = 63
"""Maximum bit length of an int `user`."""


class InputProcessor:
    """Creates the requests of one model; `GenerationMixin` submits them to an engine.

    Args:
        tokenizer: None: prompts are token ids.
        default_params: of requests without parameters.
        stop_token_ids: that end an answer.
        vocab_size: of the model.
        is_causal: whether attention within a prompt is causal.
        max_length: maximum of prompt and answer tokens together.
        limit: the setting, with its value, that determines `max_length`; for messages.
    """

    def __init__(
        self,
        tokenizer: Optional[ChatTokenizer],
        default_params: SamplingParams,
        stop_token_ids: Sequence[int],
        vocab_size: int,
        is_causal: bool,
        max_length: int,
        limit: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.default_params = default_params
        self.stop_token_ids = tuple(stop_token_ids)
        self._vocab_size = vocab_size
        self._is_causal = is_causal
        self.max_length = max_length
        self._limit = limit
        self._compiler: Optional[GrammarCompiler] = None
        self._compiler_lock = Lock()

    def prompt_token_ids(self, prompt: Prompt, history: History = ()) -> TokenIds:
        """Tokenizes a question with its history.

        Args:
            prompt, history: as in `submit`, which calls this itself. To tokenize in another
                thread, call it there and submit the result.

        Raises:
            InvalidParameterError: a text that this checkpoint cannot read, a token id out of
                range, or an invalid history.
        """
        vocab_size = self._vocab_size
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidParameterError(
                    f"prompt is the text {prompt[:40]!r}, and this checkpoint has no tokenizer; "
                    "give token ids",
                    field="prompt",
                )
            return TokenIds(self.tokenizer.encode_prompt(prompt, history), vocab_size)
        if history:
            raise InvalidParameterError(
                "history needs a prompt that is text, not token ids", field="history"
            )
        return check_token_ids(prompt, vocab_size)

    def chat_token_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_final_message: bool = False,
    ) -> TokenIds:
        """Tokenizes a conversation; submit the result.

        Args:
            messages: in OpenAI's format: roles system, user, assistant, optionally with
                `tool_calls`, and tool.
            tools: that the answer may call, `{"type": "function", "function": {...}}`.
            continue_final_message: whether the last message, an assistant's, is the beginning of
                the answer. The result has the text that follows; its reader is
                `tokenizer.answer_reader(tools, continued=True)`.

        Raises:
            InvalidParameterError: an unknown role or shape, an order that the family's chat format
                does not support, tools for a family that was not trained on them, or a checkpoint
                without a tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidParameterError(
                "messages need a tokenizer, and this checkpoint has none; submit token ids",
                field="messages",
            )
        token_ids = self.tokenizer.encode_messages(
            messages, tools, continue_final_message=continue_final_message
        )
        return TokenIds(token_ids, self._vocab_size, continue_final_message)

    def compile_grammar(
        self, grammar: Grammar, *, continued: bool = False, raw: bool = False
    ) -> GrammarMatcher:
        """Compiles a grammar for one request; `submit` calls this itself.

        Args:
            grammar: of the answer.
            continued: whether the last message is the beginning of the answer, which the grammar
                does not cover.
            raw: whether the request has no `reader`, so that its text is the model's raw output.

        Raises:
            InvalidParameterError: an unsupported or too large grammar, a checkpoint without a
                tokenizer, or llguidance is not installed.
        """
        check_kind("grammar", grammar, Grammar)
        with self._compiler_lock:
            if self._compiler is None:
                if self.tokenizer is None:
                    raise InvalidParameterError(
                        "grammar needs a tokenizer, and this checkpoint has none", "grammar"
                    )
                self._compiler = GrammarCompiler(
                    self.tokenizer, self._vocab_size, self.stop_token_ids
                )
        return self._compiler.compile(grammar, continued=continued, raw=raw)

    def _reader_of(self, prompt: Prompt) -> Optional[AnswerReader]:
        """Returns the default reader of the answer; None: text is the model's raw output."""
        if self.tokenizer is None or not isinstance(prompt, str):
            return None
        return self.tokenizer.answer_reader()

    def _request(
        self,
        prompt: Prompt,
        deliver: Callable[[Event], None],
        user: User = None,
        history: History = (),
        params: Params = None,
        reader: Optional[AnswerReader] = None,
        group: str = "",
        owner: bytes = b"",
        matcher: Optional[GrammarMatcher] = None,
    ) -> tuple[Request, AnswerCollector]:
        """Creates a request, and a collector for the events that `deliver` is called with.

        Other arguments and errors are those of `GenerationMixin.submit`, except for a full queue.
        """
        token_ids = self.prompt_token_ids(prompt, history)
        if reader is None:
            reader = self._reader_of(prompt)
        params = self._params_of(params)
        if matcher is None and params.grammar is not None:
            matcher = self.compile_grammar(
                params.grammar, continued=token_ids.continued, raw=reader is None
            )
        self._check(params, group, reader, matcher)
        check_owner(owner)
        request = Request(
            token_ids,
            params,
            user=slot_name(user),
            stop_token_ids=self.stop_token_ids,
            limit=self._answer_room(token_ids),
            vocab_size=self._vocab_size,
            deliver=deliver,
            group=group,
            owner=owner,
            matcher=matcher,
        )
        return request, AnswerCollector(request, self.tokenizer, reader, token_ids.continued)

    def _params_of(self, params: Params) -> SamplingParams:
        """Replaces None by the checkpoint's parameters."""
        if params is None:
            return self.default_params
        check_kind("params", params, SamplingParams)
        return params

    def _check(
        self,
        params: SamplingParams,
        group: str,
        reader: Optional[AnswerReader],
        matcher: Optional[GrammarMatcher],
    ) -> None:
        check_kind("group", group, str)
        if reader is not None:
            check_kind("reader", reader, AnswerReader)
        if matcher is not None:
            check_kind("matcher", matcher, GrammarMatcher)
            if matcher.vocab_size != self._vocab_size:  # would fail the whole step
                raise InvalidParameterError(
                    f"matcher is for {matcher.vocab_size} tokens; this model has "
                    f"{self._vocab_size}",
                    "matcher",
                )
            if matcher.taken:
                raise InvalidParameterError(
                    "matcher is another request's; each request needs one of its own", "matcher"
                )
        if params.stop and self.tokenizer is None:
            raise InvalidParameterError(
                f"stop is {params.stop!r}; without a tokenizer only stop_token_ids end an answer",
                field="stop",
            )
        if params.prompt_logprobs is not None and not self._is_causal:
            raise InvalidParameterError(
                f"prompt_logprobs is {params.prompt_logprobs}; for this model it must be None, "
                "because tokens of its prompts see those after them",
                field="prompt_logprobs",
            )

    def _answer_room(self, token_ids: TokenIds) -> int:
        """Returns the maximum number of answer tokens."""
        if not token_ids:
            raise InvalidParameterError("prompt has 0 tokens; it must have at least 1", "prompt")
        room = self.max_length - len(token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens; with {self._limit} it may have at most "
                f"{self.max_length - 1}",
                field="prompt",
            )
        return room


def slot_name(user: User) -> Hashable:
    """Returns the name under which a slot is held; for an anonymous request, a unique one."""
    if user is None:
        return AnonymousUser()
    if isinstance(user, bool) or not isinstance(user, (int, str)):
        raise InvalidParameterError(
            f"user is {shown(user)}; it must be an int, a str or None", "user"
        )
    if isinstance(user, int) and user.bit_length() > USER_BITS_MAX:
        raise InvalidParameterError(
            f"user is an int of {user.bit_length()} bits; it may have at most {USER_BITS_MAX}",
            "user",
        )
    # Without its subclass, whose name would make another session of an equal user.
    return int(user) if isinstance(user, int) else str.__str__(user)


def check_owner(owner: bytes) -> None:
    """Raises InvalidParameterError unless `owner` is bytes."""
    if not isinstance(owner, bytes):
        # Omits the value, which is a secret.
        raise InvalidParameterError(f"owner is of {type(owner)}; it must be bytes", "owner")
