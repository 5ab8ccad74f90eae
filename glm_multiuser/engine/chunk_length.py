"""Adapts the number of prompt tokens per step while other users decode."""

from __future__ import annotations

from collections import deque
from statistics import median

WAIT = 1.75
"""Target duration of a step with a chunk, relative to one without; few then take more than 2.5."""

FIRST = 16
"""Chunk length while others decode, before any step was measured."""

LEAST = 8
"""Minimum chunk length: fewer tokens are not worth reading all weights."""

GROWTH = 1.25
"""Maximum growth of the chunk per step: while a step is memory-bound, more tokens cost nothing, and
beyond that a lot."""

PLAIN_STEPS, CHUNKS = 9, 3
"""Number of measurements kept. Their medians are used, so that single outliers have no effect."""


class ChunkLength:
    """Chooses the chunk length that bounds the ITL of decoding users, from measured steps.

    The cost of a token depends on the machine, the model, the number of users, the prefilled part
    of the prompt, and other load, so it is measured. A prompt that follows steps without prefill
    starts with half the chunk length of the previous prompt. While no user decodes, chunks have
    full length. Answers do not depend on the chunk length.

    Args:
        longest: maximum of prompt tokens per step.
        is_fixed: every chunk has this length, whether or not others decode.

    Attributes:
        beside: prompt tokens per step while others decode.
    """

    def __init__(self, longest: int, is_fixed: bool) -> None:
        self.longest = longest
        self.is_fixed = is_fixed
        self.beside = longest if is_fixed else min(FIRST, longest)
        self._plain_seconds: deque[float] = deque(maxlen=PLAIN_STEPS)
        """Durations of steps that only decoded."""
        self._token_seconds: deque[float] = deque(maxlen=CHUNKS)
        """Additional time per token of a chunk."""
        self._prefills = False
        """Whether the last step with decoding users had a chunk."""

    def tokens(self, decoding: int) -> int:
        """Prompt tokens of a step in which `decoding` requests decode."""
        return self.beside if decoding else self.longest

    def measured(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        """Records the duration of a step."""
        if self.is_fixed or not decoding:
            return
        if not prompt_tokens:
            self._plain_seconds.append(seconds)
            if self._prefills:
                self.beside = max(self.beside // 2, min(LEAST, self.longest))
        # The last chunk of a prompt may be short, and says little about a full one.
        elif prompt_tokens >= self.beside and self._plain_seconds:
            plain = median(self._plain_seconds)
            self._token_seconds.append(max(0.0, seconds - plain) / prompt_tokens)
            most = min(self.longest, max(LEAST, int(GROWTH * prompt_tokens)))
            allowed, token = (WAIT - 1) * plain, median(self._token_seconds)
            wanted = most if allowed >= most * token else int(allowed / token)
            self.beside = max(wanted, min(LEAST, self.longest))
        self._prefills = prompt_tokens > 0
