"""Checks the TLS certificate and its key before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Optional

from glm_multiuser.errors import ConfigError


def check_certificate(certificate: Optional[str], key: Optional[str]) -> None:
    """Checks that a server can use these PEM files; both None: no TLS.

    Raises:
        ConfigError: a file is missing, unreadable, or does not match the other one.
    """
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        missing, given = ("tls_cert", "tls_key") if certificate is None else ("tls_key", "tls_cert")
        raise ConfigError(f"{missing} is missing; {given} needs it")
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} is {path!r}, which cannot be read: {error}") from error
    try:
        # Otherwise, OpenSSL asks for an encrypted key's password on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls_cert is {certificate!r} and tls_key is {key!r}; they must be a PEM "
            f"certificate and its key without a password: {error}"
        ) from error
