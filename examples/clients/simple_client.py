"""Query a running server over its simple API, `POST /`: a whole answer, then a stream.

glm-multiuser serve                      # in another terminal
pip install httpx
python examples/clients/simple_client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import sys

import httpx


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask a running server over its simple API.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--api-key", help="if the server wants one")
    arguments = parser.parse_args()
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else None
    try:
        with httpx.Client(base_url=arguments.url, headers=headers, timeout=60) as client:
            history = one_answer(client, "你好")
            one_stream(client, "Who are you?", history)
    except httpx.HTTPStatusError as error:
        print(f"error: {error.response.text}", file=sys.stderr)
        return 1
    except httpx.TransportError as error:
        print(f"error: {arguments.url}: {error}", file=sys.stderr)
        return 1
    return 0


def one_answer(client: httpx.Client, question: str) -> list[list[str]]:
    """Waits for a whole answer; returns the history for the next question."""
    response = client.post("/", json={"prompt": question}).raise_for_status()
    answer = response.json()
    print(f"> {question}\n{answer['response']}\n")
    history: list[list[str]] = answer["history"]
    return history


def one_stream(client: httpx.Client, question: str, history: list[list[str]]) -> None:
    """Prints an answer while it is being written."""
    print(f"> {question}")
    body = {"prompt": question, "history": history, "stream": True}
    with client.stream("POST", "/", json=body) as response:
        if response.is_error:
            response.read()
            response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                sys.exit(f"\nerror: {event['error']}")
            print(event["delta"], end="", flush=True)
    print(f"\n\n({event['finish_reason']})")


if __name__ == "__main__":
    sys.exit(main())
