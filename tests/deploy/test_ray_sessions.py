"""A session follows its user from one replica to the next, through the folder that they share."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from glm_multiuser.deploy.ray_broadcast import IngressMetrics, is_broadcast, merge_responses
from glm_multiuser.deploy.ray_replica import Replica, ReplicaRequest, ReplicaResponse
from tests.deploy.test_ray_parts import make_request
from tests.server.echoing import echo_llm, message
from tests.server.test_sessions import settings_of

PATH = "/v1/chat/completions"


def chat(*texts: str, user: str = "anna") -> ReplicaRequest:
    messages: list[dict[str, str]] = []
    for text in texts[:-1]:
        messages += [
            {"role": "user", "content": message(text)},
            {"role": "assistant", "content": text},
        ]
    messages.append({"role": "user", "content": message(texts[-1])})
    return make_request(PATH, {"messages": messages, "user": user})


def cached(answer: ReplicaResponse) -> int:
    assert answer.status == 200, answer.body
    held: int = json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return held


def merged(path: str, responses: list[ReplicaResponse]) -> Any:
    return json.loads(bytes(merge_responses(path, responses, IngressMetrics()).body))


def test_the_next_replica_goes_on(tmp_path: Path) -> None:
    settings = settings_of(keys={}, session_dir=str(tmp_path))
    listing = make_request("/v1/sessions", b"", "GET")
    forget = make_request("/v1/sessions/anna", b"", "DELETE")
    assert is_broadcast("GET", "/v1/sessions")
    assert is_broadcast("DELETE", "/v1/sessions/anna")

    async def run() -> None:
        first, second = (Replica(name, settings, echo_llm) for name in "ab")
        await first.start()
        assert cached(await first.call(chat("hello"))) == 0
        await first.close()  # as at a rolling update
        await second.start()
        third = Replica("c", settings, echo_llm)
        await third.start()
        try:
            assert cached(await second.call(chat("hello", "again"))) > 0
            both = [second, third]
            listed = merged("/v1/sessions", [await one.call(listing) for one in both])
            assert {"id": "anna", "place": "slot"}.items() <= listed["data"][0].items()
            status = make_request("/status", b"", "GET")
            told = [await one.call(status) for one in both]
            (one, other) = (json.loads(answer.body)["sessions"] for answer in told)
            assert (one["restored"], other["on_disk"]) == (1, 1)
            total = merged("/status", told)["sessions"]
            assert (total["on_disk"], total["disk_bytes"]) == (1, one["disk_bytes"])
            for name in ("in_memory", "memory_bytes", "restored", "restored_tokens"):
                assert total[name] == one[name] + other[name]
            assert merged("/status", told[::-1])["sessions"] == total
            gone = [await one.call(forget) for one in both]
            assert merged("/v1/sessions/anna", gone)["deleted"] is True
            assert cached(await third.call(chat("hello", "again"))) == 0
        finally:
            await second.close()
            await third.close()

    asyncio.run(run())
    assert len(list(tmp_path.glob("*.session"))) == 1


def test_sessions_that_only_another_replica_can_name_count_once(tmp_path: Path) -> None:
    settings = settings_of(keys={}, session_dir=str(tmp_path), users=1)
    listing = make_request("/v1/sessions", b"", "GET")

    async def run() -> None:
        replicas = [Replica(name, settings, echo_llm) for name in "ab"]
        for replica, users in zip(replicas, (("anna", "carl"), ("bob", "dora"))):
            await replica.start()
            for user in users:
                await replica.call(chat("hello", user=user))
        try:
            told = [await replica.call(listing) for replica in replicas]
            for responses in (told, told[::-1]):
                listed = merged("/v1/sessions", responses)["data"]
                ids = sorted(card["id"] for card in listed)
                assert ids == ["anna", "bob", "carl", "dora"]
        finally:
            for replica in replicas:
                await replica.close()

    asyncio.run(run())
