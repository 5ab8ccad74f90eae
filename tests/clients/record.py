"""Records what the installed clients send: python -m tests.clients.record"""

from __future__ import annotations

import json

from tests.clients.running import CLIENTS, missing, recording_server, run_client
from tests.server.test_recorded_clients import RECORDED


def main() -> None:
    """Writes a file for each client that is installed."""
    for client in CLIENTS:
        if missing(client):
            print(f"{client}: {missing(client)}")
            continue
        with recording_server() as (server, requests):
            answers = run_client(client, server.url)
        for request in requests:
            request["body"] = json.loads(request["body"])
        content = {"answers": answers, "requests": requests}
        file = RECORDED / f"{client}.json"
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{client}: {len(requests)} requests")


if __name__ == "__main__":
    main()
