"""One answer that a request wants, whatever protocol it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional, Union

from glm_multiuser.sampling import SamplingParams
from glm_multiuser.tokenizers import AnswerReader

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM


def sampling_of(defaults: SamplingParams, **given: Any) -> SamplingParams:
    """A checkpoint's defaults, with what a request gives (None: nothing) in their place.

    Raises:
        InvalidParameterError: a value out of range.
    """
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted: to a prompt with its history, or to a whole conversation.

    Attributes:
        prompt: a question, or token ids, whose answer is shown as the model writes it.
        history: earlier rounds.
        messages: a conversation in OpenAI's shape, instead of a prompt.
        tools: that the answer to a conversation may call.
        params: how to sample; None: as the checkpoint recommends.
        max_length: tokens of prompt and answer together.
    """

    prompt: Union[str, Sequence[int]] = ""
    history: Sequence[Any] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    params: Optional[SamplingParams] = None
    max_length: Optional[int] = None

    def token_ids(self, llm: MultiUserLLM) -> Sequence[int]:
        """What is submitted.

        Raises:
            InvalidParameterError: something that this checkpoint cannot read.
        """
        if self.messages:
            return llm.chat_token_ids(self.messages, self.tools)
        return llm.prompt_token_ids(self.prompt, self.history)

    def reader(self, llm: MultiUserLLM) -> Optional[AnswerReader]:
        """What makes content of the answer; None where it is shown as it is."""
        if llm.tokenizer is None or not isinstance(self.prompt, str):
            return None
        return llm.tokenizer.answer_reader(self.tools)

    @property
    def length(self) -> int:
        """Characters that are to be tokenized, roughly: enough to know what is long."""
        if not isinstance(self.prompt, str):
            return 0
        beside = (*self.history, *self.messages, *self.tools)
        return len(self.prompt) + sum(len(str(item)) for item in beside)

    def logged(self) -> dict[str, Any]:
        """Its texts, for a log that may have them; of a conversation the last is the prompt."""
        if not self.messages:
            return {"prompt": self.prompt, "history": self.history}
        *history, last = self.messages
        return {"prompt": last["content"], "history": history, "tools": self.tools}
