"""Records what the installed clients send: python -m tests.clients.record"""

from __future__ import annotations

import json

from tests.clients.running import (
    CLIENTS,
    STRUCTURED,
    missing,
    recording_server,
    run_client,
    run_structured,
)
from tests.server.echoing import echo_llm
from tests.server.test_recorded_clients import RECORDED
from tests.server.test_recorded_structured import RECORDED as RECORDED_STRUCTURED
from tests.structured.random_model import brief_llm


def main() -> None:
    """Writes a file for each client that is installed."""
    for client in (*CLIENTS, *STRUCTURED):
        if missing(client):
            print(f"{client}: {missing(client)}")
            continue
        structured = client in STRUCTURED
        with recording_server(brief_llm if structured else echo_llm) as (server, requests):
            run = run_structured if structured else run_client
            answers = run(client, server.url)
        for request in requests:
            request["body"] = json.loads(request["body"])
        content = {"answers": answers, "requests": requests}
        file = (RECORDED_STRUCTURED if structured else RECORDED) / f"{client}.json"
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{client}: {len(requests)} requests")


if __name__ == "__main__":
    main()
