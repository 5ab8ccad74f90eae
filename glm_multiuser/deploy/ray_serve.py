"""Ray Serve: one replica per device, and one door in front of them.

`build` is what a configuration for `serve deploy` names; see deploy/serve.yaml and docs/ray.md.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_multiuser.deploy.ray_answer import ReplicaLost
from glm_multiuser.deploy.ray_arguments import Arguments, Scale
from glm_multiuser.deploy.ray_door import Door, no_replica
from glm_multiuser.deploy.ray_replica import Answered, Asked, Replica
from glm_multiuser.deploy.ray_route import Route
from glm_multiuser.server.app import behind_the_door
from glm_multiuser.server.errors import Refusal
from glm_multiuser.server.logs import configure_logging
from glm_multiuser.server.request_log import HEADER as REQUEST_ID_HEADER
from glm_multiuser.server.settings import ServerSettings

DOOR, REPLICA = "Door", "Replica"
"""Names of the two deployments."""
UNLIMITED = 1_000_000
"""Requests that Ray may hand to one process: refusing is our own matter, in our own words."""
ENVIRONMENT = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
"""MindSpore cannot be imported after protobuf without it, and sets it too late here."""
LOOK_SECONDS = 10.0
"""In which all replicas must have answered who are only asked how they are."""
FLUSH_SECONDS = 5.0
"""For what has ended but is still being sent, when a process ends."""


class RayReplica:
    """The deployment that holds the models. Requests, drains and restarts come from Ray.

    Args:
        settings: as of a server of its own.
    """

    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc]
        configure_logging(as_json=True)
        logging.captureWarnings(True)
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(name, settings)
        await self._replica.start()

    async def answer(self, asked: Asked) -> AsyncIterator[list[Message]]:
        async with aclosing(self._replica.answer(asked)) as messages:
            async for some in messages:
                yield some

    async def answer_whole(self, asked: Asked) -> Answered:
        return await self._replica.answer_whole(asked)

    def check_health(self) -> None:
        self._replica.check_health()

    async def __del__(self) -> None:
        """Ray awaits it, after the running requests have ended."""
        if hasattr(self, "_replica"):
            await self._replica.close()


@serve.ingress()
class RayDoor:
    """The deployment that clients reach."""

    def __init__(self, replicas: DeploymentHandle[Any], settings: ServerSettings) -> None:
        configure_logging(as_json=True)
        self._settings = settings
        self._door = Door(RayReplicas(replicas, settings), settings.limits)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        heard = self._door.metrics.hear_response
        return _without_request_id(behind_the_door(self._door, self._settings, heard))


class RayReplicas:
    """How the door asks.

    Args:
        handle: of the replicas.
        settings: with the limits of a request.
    """

    def __init__(self, handle: DeploymentHandle[Any], settings: ServerSettings) -> None:
        self._handle = handle
        self._settings = settings

    async def ask(self, asked: Asked, route: Route) -> AsyncGenerator[list[Message], None]:
        """See `ray_door.Replicas`."""
        handle = self._handle.options(method_name="answer", stream=True, session_id=route.encode())
        answer = handle.remote(asked)
        ended = False
        try:
            async for messages in answer:
                yield messages
            ended = True
        except BackPressureError as error:
            raise Refusal(429, "queue_full", "too many requests wait", retry_after=1.0) from error
        except (RayError, RayServeException) as error:
            ended = True
            raise ReplicaLost from error
        finally:
            if not ended:
                answer.cancel()

    async def ask_all(self, asked: Asked) -> Sequence[Answered]:
        """See `ray_door.Replicas`."""
        asking = self._handle.broadcast("answer_whole", asked)
        looks = asked.scope["method"] != "POST"
        seconds = LOOK_SECONDS if looks else self._settings.limits.request_seconds
        try:
            said = await asking.results_async(timeout_s=seconds, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise no_replica() from error
        # Those that died meanwhile have nothing to say.
        answers = [one for one in said if isinstance(one, Answered)]
        if not answers:
            raise no_replica()
        return answers


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Ray's proxy sends the request's id itself, the same one."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID_HEADER]
            await send(message)

        await app(scope, receive, send_on)

    return answer


def application(settings: ServerSettings, scale: Scale) -> serve.Application:
    """The two deployments, ready for `serve.run`.

    Args:
        settings: of every replica; keys, limits and origins count at the door, too.
        scale: how many replicas, and what each one takes.
    """
    drain = settings.drain_seconds + FLUSH_SECONDS
    users = sum(model.users for model in settings.models if model.load)
    automatic = scale.max_replicas is not None
    replicas = serve.deployment(RayReplica).options(
        name=REPLICA,
        num_replicas=None if automatic else scale.replicas,
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.replicas,
            max_replicas=scale.max_replicas,
            # Running and queued ones: at this mean, slots are about to run out.
            target_ongoing_requests=max(1.0, scale.busy * users),
            upscale_delay_s=scale.upscale_delay_seconds,
            downscale_delay_s=scale.downscale_delay_seconds,
        )
        if automatic
        else None,
        ray_actor_options={
            "num_cpus": scale.cpus,
            "resources": _device(settings),
            "runtime_env": {"env_vars": ENVIRONMENT},
        },
        max_constructor_retry_count=3,  # what cannot be loaded will not be later
        max_ongoing_requests=UNLIMITED,
        max_queued_requests=settings.limits.requests_per_key,
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class="glm_multiuser.deploy.ray_router:StickyRouter"
        ),
    )
    door = serve.deployment(RayDoor).options(
        name=DOOR,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=UNLIMITED,
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=100,  # the new one is there before the old one goes
    )
    # Whether a page of another origin may ask is settled at the door.
    inside = replace(settings, cors_origins=())
    return door.bind(replicas.bind(inside), settings)


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application that a configuration file describes; see `Arguments`.

    Raises:
        ConfigError: an argument that is unknown, missing or out of its range.
    """
    read = Arguments.read(arguments)
    return application(read.settings(), read.scale())


def _device(settings: ServerSettings) -> dict[str, float]:
    """Ray gives each replica a device of its own, which MindSpore then sees as number 0."""
    return {"NPU": 1.0} if settings.device_target == "Ascend" else {}
