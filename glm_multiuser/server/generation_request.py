"""A request for an answer, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional, Union

from glm_multiuser.errors import PromptTooLongError
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.tokenizers import AnswerReader

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.token_ids import TokenIds


def sampling_of(defaults: SamplingParams, **given: Any) -> SamplingParams:
    """Returns a checkpoint's defaults, overridden by a request's values that are not None.

    Raises:
        InvalidParameterError: a value is out of range.
    """
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt with its history, or a conversation.

    Attributes:
        prompt: a question, or token ids, whose answer is not parsed.
        history: earlier rounds.
        messages: a conversation in OpenAI's format, instead of a prompt.
        tools: tools that the answer to a conversation may call.
        continue_final_message: whether the last message is the beginning of the answer.
        params: sampling parameters; None: the checkpoint's defaults.
        max_length: maximum tokens of prompt and answer together.
    """

    prompt: Union[str, Sequence[int]] = ""
    history: Sequence[Any] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    continue_final_message: bool = False
    params: Optional[SamplingParams] = None
    max_length: Optional[int] = None

    def token_ids(self, llm: MultiUserLLM) -> TokenIds:
        """Tokenizes the prompt.

        Raises:
            InvalidParameterError: the prompt is invalid for this checkpoint.
        """
        if self.messages:
            return llm.chat_token_ids(
                self.messages, self.tools, continue_final_message=self.continue_final_message
            )
        return llm.prompt_token_ids(self.prompt, self.history)

    def has_prompt_of(self, other: GenerationRequest) -> bool:
        """Whether both requests share one prompt, by identity."""
        return self.continue_final_message == other.continue_final_message and all(
            getattr(self, one) is getattr(other, one)
            for one in ("prompt", "history", "messages", "tools")
        )

    def sampling(self, defaults: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Returns its parameters, with `max_tokens` limited by `max_length`.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer.
        """
        params = self.params or defaults
        if self.max_length is None:
            return params
        room = self.max_length - prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"max_length is {self.max_length}; the prompt alone has {prompt_tokens} tokens",
                field="max_length",
            )
        return replace(params, max_tokens=min(room, params.max_tokens or room))

    def reader(self, llm: MultiUserLLM) -> Optional[AnswerReader]:
        """Returns the parser of content and tool calls; None if the answer is not parsed."""
        if llm.tokenizer is None or not self.is_text:
            return None
        return llm.tokenizer.answer_reader(self.tools, continued=self.continue_final_message)

    @property
    def is_text(self) -> bool:
        """False for token ids, whose answer is not parsed."""
        return isinstance(self.prompt, str)

    @property
    def length(self) -> int:
        """Approximate number of characters to tokenize, or of ids to check."""
        beside = (*self.history, *self.messages, *self.tools)
        return len(self.prompt) + sum(len(str(item)) for item in beside)

    def logged(self) -> dict[str, Any]:
        """Prompt and history for `log_prompts`; a conversation's last message is the prompt."""
        if not self.messages:
            return {"prompt": self.prompt, "history": self.history}
        *history, last = self.messages
        return {"prompt": last["content"], "history": history, "tools": self.tools}
