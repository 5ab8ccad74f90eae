"""The contents of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm_multiuser.engine.request import Request


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of a prompt; 0 while a layer-wise prefill is in progress."""

    request: Request
    tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it completes the prompt, so that there is a next token."""
        return self.request.computed_tokens + self.tokens >= len(self.request.prompt_token_ids)

    @property
    def scored(self) -> int:
        """Number of its first tokens whose logits score the prompt's next token: if requested, all
        but the prompt's last token."""
        if self.request.params.prompt_logprobs is None:
            return 0
        remaining = len(self.request.prompt_token_ids) - self.request.computed_tokens
        return min(self.tokens, remaining - 1)


@dataclass(frozen=True)
class Step:
    """Chunks of prompts, and one token for every other running request, by slot.

    `answered` and `scored` are right until `computed_tokens` of its requests include this step.

    Attributes:
        prompts: chunks of prompts that are prefilled.
        decodes: requests that get their next token.
        returning: requests that a resize paused; their keys and values are restored first.
        trimmed: slots whose memory is freed after this many tokens.
    """

    prompts: dict[int, PromptChunk] = field(default_factory=dict)
    decodes: dict[int, Request] = field(default_factory=dict)
    returning: dict[int, Request] = field(default_factory=dict)
    trimmed: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of requests that take part."""
        return len(self.prompts) + len(self.decodes)

    @property
    def requests(self) -> dict[int, Request]:
        """The requests that take part."""
        return {**{slot: chunk.request for slot, chunk in self.prompts.items()}, **self.decodes}

    @property
    def answered(self) -> dict[int, Request]:
        """The requests that get a next token, in the order of result rows: those that decode, then
        those whose prompt is complete."""
        done = {slot: chunk.request for slot, chunk in self.prompts.items() if chunk.is_last}
        return {**self.decodes, **done}

    @property
    def scored(self) -> dict[int, PromptChunk]:
        """Chunks with `scored` tokens; their result rows follow those of `answered`."""
        return {slot: chunk for slot, chunk in self.prompts.items() if chunk.scored}

    def parts(self) -> list[Step]:
        """Splits it into one step for prompts and one for decoding."""
        parts = [Step(prompts=self.prompts), Step(decodes=self.decodes)]
        return [part for part in parts if part.rows]
