"""One request for an answer, whatever protocol it came by."""

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
    """A checkpoint's defaults, with what a request gives (None: nothing) in their place.

    Raises:
        InvalidParameterError: a value out of range.
    """
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt with its history, or a whole conversation, to be answered.

    Attributes:
        prompt: a question, or token ids, whose answer is returned as the model writes it.
        history: earlier rounds.
        messages: a conversation in OpenAI's shape, instead of a prompt.
        tools: that the answer to a conversation may call.
        continue_final_message: whether its last message is the beginning of the answer.
        params: how to sample; None: as the checkpoint recommends.
        max_length: tokens of prompt and answer together.
    """

    prompt: Union[str, Sequence[int]] = ""
    history: Sequence[Any] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    continue_final_message: bool = False
    params: Optional[SamplingParams] = None
    max_length: Optional[int] = None

    def token_ids(self, llm: MultiUserLLM) -> TokenIds:
        """The prompt to submit.

        Raises:
            InvalidParameterError: a prompt that this checkpoint cannot read.
        """
        if self.messages:
            return llm.chat_token_ids(
                self.messages, self.tools, continue_final_message=self.continue_final_message
            )
        return llm.prompt_token_ids(self.prompt, self.history)

    def has_prompt_of(self, other: GenerationRequest) -> bool:
        """Whether it is another answer to the very same prompt."""
        return self.continue_final_message == other.continue_final_message and all(
            getattr(self, one) is getattr(other, one)
            for one in ("prompt", "history", "messages", "tools")
        )

    def sampling(self, defaults: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Its parameters; the answer ends when prompt and answer have `max_length` tokens.

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
        """Splits the answer into content and tool calls; None where it is returned as it is."""
        if llm.tokenizer is None or not self.is_text:
            return None
        return llm.tokenizer.answer_reader(self.tools, continued=self.continue_final_message)

    @property
    def is_text(self) -> bool:
        """False for token ids, whose answer is returned as the model writes it."""
        return isinstance(self.prompt, str)

    @property
    def length(self) -> int:
        """Characters to tokenize, roughly, or ids to check: enough to know what is long."""
        beside = (*self.history, *self.messages, *self.tools)
        return len(self.prompt) + sum(len(str(item)) for item in beside)

    def logged(self) -> dict[str, Any]:
        """Prompt and history for `log_prompts`; a conversation's last message is the prompt."""
        if not self.messages:
            return {"prompt": self.prompt, "history": self.history}
        *history, last = self.messages
        return {"prompt": last["content"], "history": history, "tools": self.tools}
