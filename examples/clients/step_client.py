"""Query a running server by polling: every call returns the new text since the last one.

    glm-multiuser serve                      # in another terminal
    pip install httpx
    python examples/clients/step_client.py --url http://127.0.0.1:8000

For clients that cannot read a stream. Two rounds, the second with the history of the first.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid

import httpx

BUSY = (429, 503)
"""Status codes of a full or starting server; the `Retry-After` header says when to retry."""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask a running server step by step.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--api-key", help="if the server wants one")
    arguments = parser.parse_args()
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else None
    history: list[tuple[str, str]] = []
    try:
        with httpx.Client(base_url=arguments.url, headers=headers, timeout=60) as client:
            for question in ("你好", "Who are you?"):
                history.append((question, ask(client, question, history)))
    except httpx.HTTPStatusError as error:
        print(f"error: {error.response.text}", file=sys.stderr)
        return 1
    except httpx.TransportError as error:
        print(f"error: {arguments.url}: {error}", file=sys.stderr)
        return 1
    return 0


def ask(client: httpx.Client, question: str, history: list[tuple[str, str]]) -> str:
    """Prints the answer while it is generated, and returns it."""
    print(f"> {question}")
    # Names this answer; a new one for every question.
    cache_id = uuid.uuid4().hex
    body = {"cache_id": cache_id, "query": question, "history": history}
    text = ""
    while True:
        answer = call(client, body)
        print(answer["delta_text"], end="", flush=True)
        text += answer["delta_text"]
        if answer["flag"] == "end":
            print("\n")
            return text
        body = {"cache_id": cache_id}  # "sending" or "hang": more text follows


def call(client: httpx.Client, body: dict[str, object]) -> dict[str, str]:
    """Makes one call, retried while the server is full or starting."""
    while True:
        response = client.post("/llm/generate", json=body)
        if response.status_code not in BUSY:
            answer: dict[str, str] = response.raise_for_status().json()
            return answer
        time.sleep(float(response.headers["Retry-After"]))


if __name__ == "__main__":
    sys.exit(main())
