"""Query a running server with OpenAI's official client.

    glm-multiuser serve                      # in another terminal
    pip install openai
    python examples/clients/openai_client.py --url http://127.0.0.1:8000

Lists the models, then requests one answer, one streamed answer, and two answers concurrently.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Optional

import openai


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask a running server with OpenAI's client.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--api-key", default="none", help="if the server wants one")
    arguments = parser.parse_args()
    place = {"base_url": f"{arguments.url.rstrip('/')}/v1", "api_key": arguments.api_key}
    try:
        with openai.OpenAI(**place) as client:
            model = first_model(client)
            if model is None:
                print("error: the server has no model that is ready", file=sys.stderr)
                return 1
            one_answer(client, model)
            one_stream(client, model)
        asyncio.run(two_users(place, model))
    except openai.OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def first_model(client: openai.OpenAI) -> Optional[str]:
    """Prints the ready models and returns the name of the first."""
    names = [model.id for model in client.models.list()]
    print(f"Models: {', '.join(names)}\n")
    return names[0] if names else None


def one_answer(client: openai.OpenAI, model: str) -> None:
    """Waits for a whole answer."""
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Who are you?"}]
    )
    print("> Who are you?")
    print(answer.choices[0].message.content)
    usage = answer.usage
    if usage is not None:
        print(f"({usage.prompt_tokens} tokens in, {usage.completion_tokens} tokens out)\n")


def one_stream(client: openai.OpenAI, model: str) -> None:
    """Prints an answer while it is being written."""
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "你好"}], stream=True
    )
    print("> 你好")
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print("\n")


async def two_users(place: dict[str, str], model: str) -> None:
    """Answers two users concurrently, each with its own session and so its own cache."""

    async def ask(client: openai.AsyncOpenAI, user: str, question: str) -> None:
        messages = [{"role": "user", "content": question}]
        stream = await client.chat.completions.create(
            model=model, messages=messages, user=user, stream=True, max_tokens=12
        )
        async for chunk in stream:
            text = chunk.choices[0].delta.content
            if text:
                print(f"{user}: {text}")

    print("Two users at once, token by token:")
    async with openai.AsyncOpenAI(**place) as client:
        await asyncio.gather(ask(client, "Anna", "Who are you?"), ask(client, "小明", "你是谁"))


if __name__ == "__main__":
    sys.exit(main())
