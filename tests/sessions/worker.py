"""A process that answers turns of conversations and never closes: to be killed between them.

It reads lines of JSON, `[[number, history, turn], ...]`, asks all of them, and writes their answers
when every session is on disk: `[[number, token_ids, logprobs, cached_tokens], ...]`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.engine.driving import wait_until
from tests.sessions.talking import Conversation, causal_llm


def main(folder: str, users: int) -> None:
    llm = causal_llm(users, session_dir=folder, max_queue=1 << 10)

    def is_written() -> bool:
        return not llm._engine.sessions._unsaved and not llm.stats().sessions.in_memory

    for line in sys.stdin:
        talks = []
        for number, history, turn in json.loads(line):
            one = Conversation(number, f"user {number}", history, turn)
            talks.append((one, one.ask(llm)))
        told: list[Any] = []
        for one, handle in talks:
            one.answered(handle.result())
            told.append((one.number, one.history, one.answers[0], one.cached[0]))
        wait_until(is_written)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
