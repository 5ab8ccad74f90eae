"""How many tokens of prompts a step takes beside users who decode."""

from __future__ import annotations

from collections import deque
from statistics import median

WAIT = 1.75
"""What a step with a chunk is to take, in steps without one; then few take more than 2.5."""

FIRST = 16
"""Tokens beside users who decode, before any step was measured."""

LEAST = 8
"""Fewer would read all weights for next to nothing."""

GROWTH = 1.25
"""Of the chunk from one step to the next, at most: while a step waits for memory tokens cost
nothing, and beyond that much."""

PLAIN_STEPS, CHUNKS = 9, 3
"""How many are remembered. Medians of them count, so that one disturbed step changes nothing."""


class ChunkLength:
    """The chunk length that keeps the ITL of decoding users within a bound, from their last steps.

    What a token costs depends on the machine, the model, the number of users, how much of the
    prompt is prefilled, and what else runs, so nothing is assumed about it. A prompt that comes
    after plain steps begins with half the length that the one before it ended with. While no user
    decodes, chunks have full length. No bit of an answer depends on them.

    Args:
        longest: tokens of prompts that one step has room for.
        is_fixed: every chunk has this length, whoever decodes.

    Attributes:
        beside: tokens of prompts in a step in which others decode.
    """

    def __init__(self, longest: int, is_fixed: bool) -> None:
        self.longest = longest
        self.is_fixed = is_fixed
        self.beside = longest if is_fixed else min(FIRST, longest)
        self._plain_seconds: deque[float] = deque(maxlen=PLAIN_STEPS)
        """Of steps that only decoded."""
        self._token_seconds: deque[float] = deque(maxlen=CHUNKS)
        """That a token of a chunk took beside them."""
        self._prefills = False
        """Whether the last step beside users who decode had a chunk."""

    def tokens(self, decoding: int) -> int:
        """Of prompts, in a step in which so many requests decode."""
        return self.beside if decoding else self.longest

    def measured(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        """What a step took, with so many tokens of prompts and so many requests that decode."""
        if self.is_fixed or not decoding:
            return
        if not prompt_tokens:
            self._plain_seconds.append(seconds)
            if self._prefills:
                self.beside = max(self.beside // 2, min(LEAST, self.longest))
        # The end of a prompt, shorter than a chunk, says little about a whole one.
        elif prompt_tokens >= self.beside and self._plain_seconds:
            plain = median(self._plain_seconds)
            self._token_seconds.append(max(0.0, seconds - plain) / prompt_tokens)
            most = min(self.longest, max(LEAST, int(GROWTH * prompt_tokens)))
            allowed, token = (WAIT - 1) * plain, median(self._token_seconds)
            wanted = most if allowed >= most * token else int(allowed / token)
            self.beside = max(wanted, min(LEAST, self.longest))
        self._prefills = prompt_tokens > 0
