"""What one step of the engine runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm_multiuser.engine.request import Request


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of a prompt; none while it is still going through the layers."""

    request: Request
    tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is in afterwards, so that there is a next token."""
        return self.request.computed_tokens + self.tokens >= len(self.request.prompt_token_ids)

    @property
    def scored(self) -> int:
        """From its first token on, how many have logits that say how likely the next token of the
        prompt was: where that is wanted, all but the last token of the prompt."""
        if self.request.params.prompt_logprobs is None:
            return 0
        remaining = len(self.request.prompt_token_ids) - self.request.computed_tokens
        return min(self.tokens, remaining - 1)


@dataclass(frozen=True)
class Step:
    """Everything by slot: chunks of prompts, and one token for every other running request.

    Attributes:
        prompts: chunks of prompts that are prefilled.
        decodes: requests that get their next token.
        returning: requests that a resize paused; their keys and values are restored first.
        trimmed: slots that give memory back, and for how many tokens each keeps it.
    """

    prompts: dict[int, PromptChunk] = field(default_factory=dict)
    decodes: dict[int, Request] = field(default_factory=dict)
    returning: dict[int, Request] = field(default_factory=dict)
    trimmed: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many requests take part in the graph."""
        return len(self.prompts) + len(self.decodes)

    @property
    def requests(self) -> dict[int, Request]:
        """Who takes part in the graph."""
        return {**{slot: chunk.request for slot, chunk in self.prompts.items()}, **self.decodes}

    @property
    def answered(self) -> dict[int, Request]:
        """Who has a next token when the step has run, in the order of its rows."""
        done = {slot: chunk.request for slot, chunk in self.prompts.items() if chunk.is_last}
        return {**done, **self.decodes}

    @property
    def scored(self) -> dict[int, PromptChunk]:
        """Chunks with `scored` tokens; the rows of these follow those of `answered`."""
        return {slot: chunk for slot, chunk in self.prompts.items() if chunk.scored}

    def parts(self) -> list[Step]:
        """The same as one step for prompts and one for the others."""
        parts = [Step(prompts=self.prompts), Step(decodes=self.decodes)]
        return [part for part in parts if part.rows]
