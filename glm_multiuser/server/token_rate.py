"""Generated tokens per second, over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW_SECONDS = 60


class TokenRate:
    """Rates of the last minute; `sample` is called once a second."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self.per_second: deque[int] = deque(maxlen=WINDOW_SECONDS)
        """Oldest first."""

    def sample(self, generated: Mapping[str, int]) -> None:
        """Records the total of tokens that each model has generated so far."""
        # A reloaded model counts from 0.
        new = [max(0, count - self._before.get(name, 0)) for name, count in generated.items()]
        self._before = dict(generated)
        self.per_second.append(sum(new))
