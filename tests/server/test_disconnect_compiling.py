"""A client that disconnects while its grammar waits to be compiled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.asking import Wire, in_background, nothing_stays
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
    wait_until,
)
from tests.server.test_fair_shares import choose, held_compiler
from tests.structured.random_model import chatglm3_llm

pytestmark = pytest.mark.slow

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}]})
COMPLETION = ("/v1/completions", {"prompt": "q"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [CHAT, COMPLETION])
def test_who_goes_away_while_a_grammar_is_compiled_makes_room(
    path: str, prompt: dict[str, Any], stream: bool
) -> None:
    def ask(word: str) -> Wire:
        return Wire(server.url).request(path, {**prompt, "stream": stream, "guided_choice": [word]})

    settings = mock_settings(users=1, max_queue=1)
    with in_process_server(settings, chatglm3_llm) as server, nothing_stays(server):
        with held_compiler(server) as compiled:
            compiling = ask("compiling")
            wait_until(lambda: compiled)
            waiting = ask("waiting")
            wait_until_admitted(server, 2)
            waiting.close()
            wait_until_admitted(server, 1)
            compiling.close()
            wait_until_admitted(server, 0)
            asked = [in_background(choose, server, "a") for _ in range(2)]
            wait_until_admitted(server, 2)
        assert [one.result(PATIENCE).status_code for one in asked] == [200, 200]
        assert compiled == ["compiling", "a", "a"]
        assert server.service.requests == 2


def wait_until_admitted(server: InProcessServer, count: int) -> None:
    wait_until(lambda: server.service.admission.in_flight == count)
