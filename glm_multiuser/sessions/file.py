"""Session files, in safetensors format: token ids, and bytes of the KV cache.

The metadata identifies the model, weights and numeric settings (the fingerprint) and the owner (the
identity), and has a checksum of everything after it. Files contain no names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from glm_multiuser.errors import SessionError
from glm_multiuser.sessions.session import TOKEN_BYTES, Session

FORMAT = 1
"""Incremented when the format changes."""

LARGEST_HEADER = 1 << 22
"""Bytes; headers have about ten per piece."""


def write_file(path: Path, session: Session, fingerprint: str, identity: str) -> None:
    """Writes a file atomically, with mode 0600, and syncs it to disk.

    Raises:
        OSError: the file cannot be written.
    """
    token_ids = np.array(session.token_ids, "<i4")
    parts = [token_ids.view(np.uint8), *session.pieces]
    header = _header(session, fingerprint, identity, _digest(parts))
    handle, name = mkstemp(".part", f".{path.name}-", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for part in parts:
                file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    _sync_folder(path.parent)


def read_file(path: Path, fingerprint: str, identity: str = "") -> Session:
    """Reads a file of `write_file`.

    Args:
        path: of the file.
        fingerprint: of the engine that will use it.
        identity: the required owner; "": any.

    Raises:
        OSError: the file cannot be read.
        SessionError: it is damaged, or belongs to another engine or identity.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, LARGEST_HEADER):
            raise SessionError(f"{path} is damaged: it has no header")
        metadata = _metadata(path, file.read(length))
        if metadata.get("format") != str(FORMAT) or metadata.get("fingerprint") != fingerprint:
            raise SessionError(f"{path} belongs to another model, other weights or settings")
        if identity and metadata.get("identity") != identity:
            raise SessionError(f"{path} belongs to somebody else")
        content = np.fromfile(file, np.uint8)
    tokens, sizes = _sizes(path, metadata)
    if len(content) != TOKEN_BYTES * tokens + sum(sizes):
        raise SessionError(f"{path} is damaged: it is cut short")
    ends = np.cumsum([TOKEN_BYTES * tokens, *sizes])
    ids, *pieces = np.split(content, ends[:-1])
    if metadata.get("checksum") != _digest([ids, *pieces]):
        raise SessionError(f"{path} is damaged: its checksum is wrong")
    return Session(tuple(ids.view("<i4").tolist()), pieces)


def _header(session: Session, fingerprint: str, identity: str, checksum: str) -> bytes:
    begin = TOKEN_BYTES * len(session.token_ids)
    end = session.nbytes
    metadata = {
        "format": str(FORMAT),
        "fingerprint": fingerprint,
        "identity": identity,
        "checksum": checksum,
        "sizes": json.dumps([piece.nbytes for piece in session.pieces]),
    }
    tokens = {"dtype": "I32", "shape": [len(session.token_ids)], "data_offsets": [0, begin]}
    pieces = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    header = {"__metadata__": metadata, "token_ids": tokens, "keys_and_values": pieces}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _metadata(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
        found = header["__metadata__"]
        found = {**found, "tokens": header["token_ids"]["shape"][0]}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise SessionError(f"{path} is damaged: its header cannot be read") from None
    return found


def _sizes(path: Path, metadata: dict[str, Any]) -> tuple[int, list[int]]:
    """Returns the number of tokens, and the bytes of each piece."""
    try:
        sizes = list(json.loads(metadata["sizes"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        raise SessionError(f"{path} is damaged: its header cannot be read") from None
    numbers = [metadata["tokens"], *sizes]
    if not all(type(one) is int and one >= 0 for one in numbers):
        raise SessionError(f"{path} is damaged: its header makes no sense")
    return numbers[0], numbers[1:]


def _digest(parts: Sequence[NDArray[np.uint8]]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Syncs the renaming to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
