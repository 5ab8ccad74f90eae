"""Replica selection for Ray Serve."""

from __future__ import annotations

from typing import Optional

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from glm_multiuser.deploy.ray_route import Route


class StickyRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Consistent hashing by user, so that requests find their user's prefix cache.

    Adding or removing a replica moves only the users next to it on the hash ring.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: Optional[PendingRequest] = None,
    ) -> list[list[RunningReplica]]:
        """Returns groups of replicas, best first; Ray takes the least busy one of a group."""
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        route = _route_of(pending_request)
        holders = [one for one in candidate_replicas if _name(one) == route.holder]
        if holders:
            return [holders]
        if not route.user:
            ranked = [candidate_replicas]
        wanted = [[one for one in group if _name(one) not in route.excluded] for group in ranked]
        return wanted if any(wanted) else ranked

    def _routing_key(self, pending_request: Optional[PendingRequest]) -> Optional[str]:
        user = _route_of(pending_request).user
        return user or super()._routing_key(pending_request)


def _route_of(pending_request: Optional[PendingRequest]) -> Route:
    return Route() if pending_request is None else Route.decode(pending_request.metadata.session_id)


def _name(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)
