"""CORS that also allows the headers of OpenAI's clients."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

ABOUT_CLIENT = "x-stainless-"
"""Prefix of the headers in which OpenAI's clients describe themselves."""
REQUESTED = "access-control-request-headers"
ALLOWED = "access-control-allow-headers"


class ClientCORSMiddleware(CORSMiddleware):
    """Also allows headers with the prefix `ABOUT_CLIENT`; Starlette compares whole names."""

    def preflight_response(self, request_headers: Headers) -> Response:
        headers = MutableHeaders(raw=list(request_headers.raw))
        names = [name.strip() for name in headers.get(REQUESTED, "").split(",")]
        about_client = [name for name in names if name.lower().startswith(ABOUT_CLIENT)]
        if about_client:
            del headers[REQUESTED]
            others = ", ".join(name for name in names if name not in about_client)
            if others:
                headers[REQUESTED] = others
        response = super().preflight_response(headers)
        if about_client:
            response.headers[ALLOWED] = ", ".join([response.headers[ALLOWED], *about_client])
        return response
