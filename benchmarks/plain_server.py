"""Baseline server: one conversation at a time, with a lock around `chat`.

    python benchmarks/plain_server.py --checkpoint FOLDER --port 8001

Works like many models' demos and serves as the baseline of benchmarks. Implements just enough of
OpenAI's API for a load client.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from anyio import to_thread
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from glm_multiuser import MultiUserLLM, SamplingParams


@asynccontextmanager
async def a_thread_for_each_client(app: FastAPI) -> AsyncIterator[None]:
    # Clients wait for the lock in threads; if they took all, the one with the lock would get none.
    to_thread.current_default_thread_limiter().total_tokens = math.inf
    yield


def create_app(llm: MultiUserLLM) -> FastAPI:
    """One global lock, held until an answer is complete."""
    app = FastAPI(lifespan=a_thread_for_each_client)
    lock = threading.Lock()

    @app.get("/ready")
    def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> StreamingResponse:
        params = SamplingParams(
            temperature=body.get("temperature", 0.0),
            max_tokens=body["max_tokens"],
            ignore_eos=body.get("ignore_eos", False),
        )
        return StreamingResponse(events(body, params), media_type="text/event-stream")

    def events(body: dict[str, Any], params: SamplingParams) -> Iterator[str]:
        chunk = {"id": "plain", "object": "chat.completion.chunk", "model": body["model"]}
        chunk["created"] = int(time.time())

        def event(**fields: Any) -> str:
            return "data: " + json.dumps({**chunk, **fields}) + "\n\n"

        with lock:
            stream = llm.stream_chat(body["messages"][-1]["content"], params=params)
            for piece in stream:
                choice = {"index": 0, "delta": {"content": piece.text}}
                yield event(choices=[{**choice, "finish_reason": piece.finish_reason}])
            usage = stream.result().usage
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        yield event(choices=[], usage=counts)
        yield "data: [DONE]\n\n"

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--seq-length", type=int, default=256)
    options = parser.parse_args()
    with MultiUserLLM.from_pretrained(
        options.checkpoint, users=1, seq_length=options.seq_length
    ) as llm:
        uvicorn.run(create_app(llm), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
