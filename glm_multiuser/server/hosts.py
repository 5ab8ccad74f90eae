"""Middleware for the Host header, and for the path prefix of a reverse proxy."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Optional
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_multiuser.server.errors import APIError, error_response

HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]{1,253}))(?::[0-9]{0,5})?")
"""An IPv6 address in brackets, an IPv4 address or a name; optionally a port."""


class HostMiddleware:
    """Rejects requests for other hosts, against DNS rebinding.

    A page whose name is rebound to this server sends that name. Addresses are accepted, because
    they cannot be rebound.

    Args:
        app: the application.
        allowed: names besides localhost and this machine's.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self.app = app
        names = ("localhost", socket.gethostname(), socket.getfqdn(), *allowed)
        self.names = frozenset(_normal(name) for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except APIError as error:
                await error_response(scope["path"], error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Checks the header `Host`, which is optional in HTTP/1.0 only.

        Raises:
            APIError: 400, it is missing, repeated, or not a host name; 421, another host.
        """
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not hosts and scope.get("http_version") == "1.0":
            return
        name = name_of(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            shown = ", ".join(map(repr, hosts)) or "missing"
            raise APIError(400, "invalid_host", f"header Host is {shown}; it must be one host name")
        if not is_address(name) and _normal(name) not in self.names:
            raise APIError(
                421,
                "unknown_host",
                f"header Host is {hosts[0]!r}; the server answers to it with --allowed-host {name}",
            )


class RootPathMiddleware:
    """Strips a reverse proxy's prefix from paths, if the proxy does not, and adds it to redirects.

    Args:
        app: the application.
        root_path: the prefix, such as "/glm".
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if path == self.root_path:
            # The page's links are relative.
            await RedirectResponse(f"{path}/")(scope, receive, send)
            return
        if path.startswith(f"{self.root_path}/"):
            path = path[len(self.root_path) :]

        async def send_redirects(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "location" in headers:
                    place = urlsplit(headers["location"])._replace(scheme="", netloc="")
                    headers["location"] = self.root_path + place.geturl()
            await send(message)

        await self.app({**scope, "path": path}, receive, send_redirects)


def name_of(host: str) -> Optional[str]:
    """The name or address in a `Host` header, without port and brackets; None if invalid."""
    found = HOST.fullmatch(host)
    return (found[1] or found[2]) if found else None


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _normal(name: str) -> str:
    return name.lower().rstrip(".")
