"""HTTPS, and a reverse proxy: its path prefix, and its forwarded addresses."""

from __future__ import annotations

import logging
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import httpx
import pytest

from glm_multiuser import ConfigError
from glm_multiuser.cli import loading
from glm_multiuser.cli.commands import app
from glm_multiuser.server.http_protocol import HEAD_BYTES
from glm_multiuser.server.run import listen
from glm_multiuser.server.settings import Limits
from tests.cli.conftest import separate_streams
from tests.server import in_process
from tests.server.asking import HTTP, KEYS, RED, Wire, answer_alone, get, nothing_stays, post
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
    wait_until,
)
from tests.server.process import ROOT

pytestmark = pytest.mark.slow

TLS = Path(__file__).with_name("tls")
CERTIFICATE, KEY = str(TLS / "localhost.pem"), str(TLS / "localhost.key")
"""Self-signed certificate for localhost and 127.0.0.1."""


# TLS.


@pytest.fixture(scope="module")
def secure() -> Iterator[InProcessServer]:
    """For tests that leave it as it was."""
    settings = mock_settings(tls_cert=CERTIFICATE, tls_key=KEY, keys=KEYS)
    with in_process_server(settings) as server:
        yield server


@pytest.fixture
def https() -> Iterator[httpx.Client]:
    """A client that trusts this certificate only."""
    context = ssl.create_default_context(cafile=CERTIFICATE)
    with httpx.Client(verify=context, trust_env=False, timeout=PATIENCE) as client:
        yield client


def test_every_request_comes_encrypted(secure: InProcessServer, https: httpx.Client) -> None:
    assert secure.url.startswith("https://127.0.0.1:")
    body: dict[str, Any] = {"prompt": "ab"}
    assert https.get(secure.url).status_code == 200
    assert https.post(secure.url, json=body).status_code == 401
    answer = https.post(secure.url, json=body, headers=RED)
    assert answer.json()["response"] == answer_alone("ab")
    own = {**RED, "origin": secure.url}
    assert https.post(secure.url, json=body, headers=own).status_code == 200
    streamed = https.post(secure.url, json={**body, "stream": True}, headers=RED)
    assert '"finish_reason"' in streamed.text


def test_without_encryption_there_is_no_answer(secure: InProcessServer) -> None:
    wire = Wire(secure.url)
    wire.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"HTTP" not in wire.read_to_end()
    wire.close()


def test_limits_count_behind_tls_too(secure: InProcessServer, https: httpx.Client) -> None:
    with nothing_stays(secure):
        context = ssl.create_default_context(cafile=CERTIFICATE)
        address = ("127.0.0.1", int(secure.url.rpartition(":")[2]))
        with (
            socket.create_connection(address, PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as wire,
        ):
            wire.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES)
            assert wire.recv(12) == b"HTTP/1.1 431"


def serve(*arguments: str) -> Any:
    return separate_streams().invoke(
        app, ["serve", "--port", "0", *arguments], env={"COLUMNS": "300"}
    )


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Certificates and keys that a server cannot use."""
    (tmp_path / "empty").write_bytes(b"")
    made = {"missing": str(tmp_path / "no such file"), "empty": str(tmp_path / "empty")}
    if shutil.which("openssl"):
        for name, options in (
            ("other", ("genpkey", "-algorithm", "RSA")),
            ("encrypted", ("pkey", "-in", KEY, "-aes256", "-passout", "pass:secret")),
        ):
            made[name] = str(tmp_path / name)
            command = ["openssl", *options, "-out", made[name]]
            subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.mark.parametrize(
    ("certificate", "key", "told"),
    [
        (None, KEY, "tls_cert is missing; tls_key needs it"),
        (CERTIFICATE, None, "tls_key is missing; tls_cert needs it"),
        ("missing", KEY, "No such file or directory"),
        (CERTIFICATE, "missing", "No such file or directory"),
        ("empty", KEY, "they must be a PEM certificate and its key without a password"),
        (CERTIFICATE, "empty", "they must be a PEM certificate and its key without a password"),
        (KEY, CERTIFICATE, "they must be a PEM certificate and its key without a password"),
        (CERTIFICATE, "other", "they must be a PEM certificate and its key without a password"),
        (CERTIFICATE, "encrypted", "they must be a PEM certificate and its key without a password"),
        (str(TLS), KEY, "Is a directory"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_told_before_anything_loads(
    certificate: Optional[str],
    key: Optional[str],
    told: str,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if {certificate, key} & {"other", "encrypted"} - {*files}:
        pytest.skip("needs openssl")
    monkeypatch.setattr(loading, "llm_class", lambda: pytest.fail("it loads"))
    options = (("--tls-cert", certificate), ("--tls-key", key))
    given = [one for name, file in options if file for one in (name, files.get(file, file))]
    result = serve(*given)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


# Settings.


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"allowed_hosts": ("https://example.org",)}, "allowed_hosts has 'https://example.org'"),
        ({"allowed_hosts": ("example.org:80",)}, "allowed_hosts has 'example.org:80'"),
        ({"allowed_hosts": ("*",)}, "allowed_hosts has '*'"),
        ({"root_path": "glm"}, "root_path is 'glm'"),
        ({"root_path": "/glm/"}, "root_path is '/glm/'"),
        ({"root_path": "/"}, "root_path is '/'"),
        ({"root_path": "/a b"}, "root_path is '/a b'"),
        ({"forwarded_allow_ips": "proxy"}, "forwarded_allow_ips has 'proxy'"),
        ({"forwarded_allow_ips": "10.0.0.1/8"}, "forwarded_allow_ips has '10.0.0.1/8'"),
        ({"forwarded_allow_ips": "10.0.0.1,nobody"}, "forwarded_allow_ips has 'nobody'"),
        ({"forwarded_allow_ips": "10.0.0.1,*"}, "forwarded_allow_ips has '*'"),
    ],
)
def test_a_setting_that_is_none(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        mock_settings(**settings)


@pytest.mark.parametrize("proxy", [{"root_path": "/glm"}, {"forwarded_allow_ips": "127.0.0.1"}])
def test_clients_of_a_proxy_on_this_machine_do_not_control_models(proxy: dict[str, Any]) -> None:
    assert mock_settings().at("127.0.0.1").model_control == "all"
    assert mock_settings(**proxy).at("127.0.0.1").model_control == "none"


@pytest.mark.parametrize(
    "option",
    [
        ("--tls-cert", CERTIFICATE, "--tls-key", KEY),
        ("--root-path", "/glm"),
        ("--forwarded-allow-ips", "*"),
    ],
)
def test_with_several_replicas_the_proxy_is_another_one(option: tuple[str, ...]) -> None:
    result = serve("--replicas", "2", *option)
    assert result.exit_code == 2
    assert f"{option[0]} is {option[1]}" in " ".join(result.stderr.split())


# A path.


@pytest.fixture(scope="module")
def mounted() -> Iterator[InProcessServer]:
    """Behind a proxy that serves it under a path."""
    # The step API's answers are not read to their ends.
    settings = mock_settings(root_path="/some/glm", keys=KEYS, drain_seconds=0.0)
    with in_process_server(settings) as server:
        yield server


@pytest.fixture(params=["/some/glm", ""], ids=["path kept", "path taken off"])
def prefix(request: pytest.FixtureRequest) -> str:
    """What the proxy leaves of it."""
    return str(request.param)


def test_every_protocol_is_there(mounted: InProcessServer, prefix: str) -> None:
    answer = post(mounted, f"{prefix}/", {"prompt": "ab"}, **RED)
    assert answer.json()["response"] == answer_alone("ab")
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v2/models/mock/generate", {"prompt": "ab"}),
        ("/llm/generate", {"cache_id": prefix or "an id", "query": "ab"}),
    ):
        assert post(mounted, prefix + path, body, **RED).status_code == 200
        assert post(mounted, prefix + path, body).status_code == 401
    assert get(mounted, f"{prefix}/v2/health/live").status_code == 200
    missing = get(mounted, f"{prefix}/v1/nothing", **RED)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_the_page_and_all_it_refers_to(mounted: InProcessServer, prefix: str) -> None:
    page = get(mounted, f"{prefix}/")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert links
    for link in links:
        assert not link.startswith(("/", "http"))
        assert get(mounted, f"{prefix}/{link}").status_code == 200


def test_without_its_last_slash_the_page_moves(mounted: InProcessServer) -> None:
    moved = get(mounted, "/some/glm")
    assert (moved.status_code, moved.headers["location"]) == (307, "/some/glm/")


def test_redirects_keep_the_path(mounted: InProcessServer, prefix: str) -> None:
    moved = get(mounted, f"{prefix}/status/?a=b", **RED)
    assert (moved.status_code, moved.headers["location"]) == (307, "/some/glm/status?a=b")


def test_the_description_names_the_path(mounted: InProcessServer, prefix: str) -> None:
    described = get(mounted, f"{prefix}/openapi.json", **RED).json()
    assert described["servers"] == [{"url": "/some/glm"}]
    assert "/v1/models" in described["paths"]


@pytest.mark.parametrize("path", ["/some/glmv1/models", "/glm/v1/models", "/some/glm/some/glm/v1"])
def test_another_path_is_none(mounted: InProcessServer, path: str) -> None:
    assert get(mounted, path, **RED).status_code == 404


def test_the_documented_proxy_waits_as_long_as_an_answer_may_take() -> None:
    documented = (ROOT / "docs/server.md").read_text("utf-8")
    assert f"proxy_read_timeout {Limits.request_seconds:g}s;" in documented


# Addresses.


FORWARDED = {"x_forwarded_for": "192.0.2.7, 203.0.113.9", "x_forwarded_proto": "https"}


@pytest.mark.parametrize(
    ("trusted", "client"),
    [
        ("", "127.0.0.1"),
        ("10.0.0.0/8", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9"),
        ("127.0.0.0/8, 203.0.113.9", "192.0.2.7"),
    ],
)
def test_only_a_proxy_that_is_trusted_names_clients(
    trusted: str, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with in_process_server(mock_settings(forwarded_allow_ips=trusted)) as server:
        get(server, "/status", **FORWARDED)
        wait_until(lambda: any(one["path"] == "/status" for one in logged(caplog)))
    (line,) = (one for one in logged(caplog) if one["path"] == "/status")
    assert line["client"] == client


def test_a_proxy_of_ipv4_is_trusted_on_a_socket_for_both(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(in_process, "listen", lambda _, port: listen("::", port))
    with in_process_server(mock_settings(forwarded_allow_ips="127.0.0.1")) as server:
        address = server.url.replace("[::]", "127.0.0.1")
        for path, headers in (("/status", FORWARDED), ("/version", {})):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            assert HTTP.get(address + path, headers=named).status_code == 200
        wait_until(lambda: {"/status", "/version"} <= {one["path"] for one in logged(caplog)})
    clients = {line["path"]: line["client"] for line in logged(caplog)}
    assert clients["/status"] == "203.0.113.9"
    assert clients["/version"] == "127.0.0.1"


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The requests in the log, of which some may be those of the test before."""
    records = [record for record in list(caplog.records) if record.msg == "request"]
    return [record.__dict__["fields"] for record in records]
