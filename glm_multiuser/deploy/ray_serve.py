"""Ray Serve: one replica per device behind one ingress.

`build` is the `import_path` of deploy/serve.yaml; see docs/ray.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
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

from glm_multiuser.backends.native.library import THREADS
from glm_multiuser.deploy.ray_arguments import Scale, read_arguments
from glm_multiuser.deploy.ray_ingress import Ingress, no_replica
from glm_multiuser.deploy.ray_replica import (
    Replica,
    ReplicaRequest,
    ReplicaResponse,
    no_answer,
)
from glm_multiuser.deploy.ray_response import ReplicaLost
from glm_multiuser.deploy.ray_route import Route
from glm_multiuser.server.app import wrap_middleware
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.loading import with_local_paths
from glm_multiuser.server.logs import configure_logging
from glm_multiuser.server.middleware import HEALTH_PATHS
from glm_multiuser.server.request_log import HEADER as REQUEST_ID_HEADER
from glm_multiuser.server.run import FLUSH_SECONDS
from glm_multiuser.server.settings import ServerSettings
from glm_multiuser.server.tracing import BEFORE_MINDSPORE

INGRESS, REPLICA = "Ingress", "Replica"
"""Deployment names."""
UNLIMITED = 1_000_000
"""Concurrent requests per process for Ray, because admission control is our own."""
STATUS_TIMEOUT_SECONDS = 4.0
"""Timeout of a broadcast GET; replicas answer within milliseconds, and Prometheus waits no longer
than deploy/prometheus/prometheus.yml has between two scrapes."""
HEALTH_TIMEOUT_SECONDS = 0.5
"""Timeout of the other replicas when one is healthy; probes often wait one second."""


class RayReplica:
    """The deployment that holds the models.

    Args:
        settings: as for a single server.
    """

    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc]
        configure_logging(as_json=True)
        logging.captureWarnings(True)
        name = serve.get_replica_context().replica_id.unique_id
        settings = await asyncio.to_thread(with_local_paths, settings)
        self._replica = Replica(name, settings)
        await self._replica.start()

    async def stream(self, request: ReplicaRequest) -> AsyncIterator[list[Message]]:
        async with aclosing(self._replica.stream(request)) as messages:
            async for some in messages:
                yield some

    async def call(self, request: ReplicaRequest) -> ReplicaResponse:
        return await self._replica.call(request)

    def check_health(self) -> None:
        self._replica.check_health()

    async def __del__(self) -> None:
        """Awaited by Ray after running requests have ended."""
        if hasattr(self, "_replica"):
            await self._replica.close()


@serve.ingress()
class RayIngress:
    """The deployment that receives requests of clients."""

    def __init__(self, replicas: DeploymentHandle[Any], settings: ServerSettings) -> None:
        configure_logging(as_json=True)
        self._settings = settings
        self._ingress = Ingress(RayReplicas(replicas, settings), settings.limits)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        record = self._ingress.metrics.record_response
        return _behind_proxy(wrap_middleware(self._ingress, self._settings, record))


class RayReplicas:
    """Transport from the ingress to the replicas, by Ray's handles.

    Args:
        handle: of their deployment.
        settings: for the request timeout.
    """

    def __init__(self, handle: DeploymentHandle[Any], settings: ServerSettings) -> None:
        self._handle = handle
        self._settings = settings
        self._names: set[str] = set()
        """Replicas that answered the last broadcast, or hung: Ray does not report whose
        answer is missing."""

    async def send(
        self, request: ReplicaRequest, route: Route
    ) -> AsyncGenerator[list[Message], None]:
        """See `ray_ingress.Replicas`."""
        handle = self._handle.options(method_name="stream", stream=True, session_id=route.encode())
        response = handle.remote(request)
        ended = False
        try:
            async for messages in response:
                yield messages
            ended = True
        except BackPressureError as error:
            raise APIError(429, "queue_full", "too many requests wait", retry_after=1.0) from error
        except (RayError, RayServeException) as error:
            ended = True
            raise ReplicaLost from error
        finally:
            if not ended:
                response.cancel()

    async def broadcast(self, request: ReplicaRequest) -> Sequence[ReplicaResponse]:
        """See `ray_ingress.Replicas`."""
        pending = self._handle.broadcast("call", request)
        reads = request.scope["method"] in ("GET", "HEAD")
        seconds = STATUS_TIMEOUT_SECONDS if reads else self._settings.limits.request_seconds
        try:
            # `results_async` would drop all results if one replica hangs.
            fetched = pending._fetch_replica_results_async()
            results = await asyncio.wait_for(fetched, seconds)
        except (RayError, RayServeException, asyncio.TimeoutError) as error:
            raise no_replica() from error
        if not results:  # all have died, and Ray has not noticed yet
            raise no_replica()
        calls = [asyncio.ensure_future(one.get_async()) for one in results]
        try:
            late = await _late(calls, seconds, request.scope["path"] in HEALTH_PATHS)
            done = [call for call in calls if call not in late]
            ended = await asyncio.gather(*done, return_exceptions=True)
        finally:
            for call in calls:
                call.cancel()
        # The rest are errors of replicas that died meanwhile.
        responses = [one for one in ended if isinstance(one, ReplicaResponse)]
        names = {one.replica for one in responses}
        missing = sorted(self._names - names)[: len(late)]
        self._names = {*names, *missing}
        missing += ["unknown"] * (len(late) - len(missing))
        responses += [no_answer(name, request.scope["path"], seconds) for name in missing]
        if not responses:
            raise no_replica()
        return responses


async def _late(
    calls: Sequence[asyncio.Future[ReplicaResponse]], seconds: float, one_will_do: bool
) -> set[asyncio.Future[ReplicaResponse]]:
    """Waits for calls, and returns those that have not ended.

    Args:
        one_will_do: whether one response with status 200 is enough.
    """
    if one_will_do:
        done, late = await asyncio.wait(calls, timeout=HEALTH_TIMEOUT_SECONDS)
        if any(call.exception() is None and call.result().status == 200 for call in done):
            return late
    _, late = await asyncio.wait(calls, timeout=seconds)
    return late


def _behind_proxy(app: ASGIApp) -> ASGIApp:
    """Adapts the application to Ray's proxy, which adds the request id header itself."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_end() -> Message:
            try:
                return await receive()
            except RayError:  # the proxy cancels requests of clients that have disconnected
                return {"type": "http.disconnect"}

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID_HEADER]
            await send(message)

        await app(scope, receive_or_end, send_on)

    return answer


def _environment(cpus: float) -> dict[str, str]:
    """Variables of a replica: its kernels have a thread for each of its cores."""
    threads = os.environ.get(THREADS) or str(max(1, int(cpus)))
    return {**BEFORE_MINDSPORE, THREADS: threads}


def application(settings: ServerSettings, scale: Scale) -> serve.Application:
    """Returns both deployments, bound for `serve.run`.

    Args:
        settings: of every replica; the ingress also checks keys and limits, and only it origins.
        scale: number and resources of the replicas.
    """
    drain = settings.drain_seconds + FLUSH_SECONDS
    users = sum(model.engine.users for model in settings.models if model.load)
    automatic = scale.max_replicas is not None
    replicas = serve.deployment(RayReplica).options(
        name=REPLICA,
        num_replicas=None if automatic else scale.replicas,
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.replicas,
            max_replicas=scale.max_replicas,
            # Running and queued requests: at this mean, slots are about to run out.
            target_ongoing_requests=max(1.0, scale.busy * users),
            upscale_delay_s=scale.upscale_delay_seconds,
            downscale_delay_s=scale.downscale_delay_seconds,
        )
        if automatic
        else None,
        ray_actor_options={
            "num_cpus": scale.cpus,
            "resources": _device(settings),
            "runtime_env": {"env_vars": _environment(scale.cpus)},
        },
        max_constructor_retry_count=3,  # a load that fails will fail again
        max_ongoing_requests=UNLIMITED,
        max_queued_requests=settings.limits.requests_per_key,
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class="glm_multiuser.deploy.ray_router:StickyRouter"
        ),
    )
    ingress = serve.deployment(RayIngress).options(
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=UNLIMITED,
        graceful_shutdown_timeout_s=drain + FLUSH_SECONDS,  # to tell clients of ended replicas
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=100,  # start the new one before the old one stops
    )
    # The ingress has checked the origin.
    inside = replace(settings, cors_origins=())
    return ingress.bind(replicas.bind(inside), settings)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Builds the application from the `args` of a configuration file; see `arguments_model`.

    Raises:
        ConfigError: as in `read_arguments`.
    """
    settings, scale = read_arguments(arguments)
    return application(settings, scale)


def _device(settings: ServerSettings) -> dict[str, float]:
    """Reserves an NPU for each replica, which is device 0 for its MindSpore; none on CPU."""
    return {"NPU": 1.0} if settings.models[0].engine.device_target == "Ascend" else {}
