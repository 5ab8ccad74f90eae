"""Tensor data: as JSON, and as raw bytes after it (Triton's binary tensor data extension).

A BYTES element is its length, 4 bytes little-endian, followed by its UTF-8; an INT16 element is 2
bytes, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from glm_multiuser.errors import shown
from glm_multiuser.server.errors import APIError, bad_request
from glm_multiuser.server.kserve.signature import Element

LENGTH = struct.Struct("<I")
INT16 = struct.Struct("<h")
INT16_RANGE = range(-(2**15), 2**15)


def wrong(name: str, problem: str) -> APIError:
    """Returns an error 400 about a tensor or another field."""
    return bad_request(f"{name} {problem}", field=name)


def from_json(name: str, datatype: str, data: Sequence[Any]) -> list[Element]:
    """Returns the elements of a tensor's `data`, which may be nested like its shape.

    Raises:
        APIError: 400, an element of the wrong type or out of range.
    """
    elements = list(_flat(data))
    for place, element in enumerate(elements):
        if datatype == "BYTES" and not isinstance(element, str):
            raise wrong(name, f"has {shown(element)} at place {place}; it must hold strings")
        if datatype == "INT16" and (type(element) is not int or element not in INT16_RANGE):
            raise wrong(
                name,
                f"has {shown(element)} at place {place}; it must hold whole numbers from "
                f"{INT16_RANGE[0]} to {INT16_RANGE[-1]}",
            )
    return elements


def from_binary(name: str, datatype: str, data: bytes) -> list[Element]:
    """Decodes the elements of a tensor's raw bytes.

    Raises:
        APIError: 400, lengths that do not match the bytes, or invalid UTF-8.
    """
    if datatype == "INT16":
        if len(data) % INT16.size:
            raise wrong(name, f"has {len(data)} bytes; INT16 elements have {INT16.size} each")
        return [number for (number,) in INT16.iter_unpack(data)]
    return list(_texts(name, data))


def to_binary(texts: Sequence[str]) -> bytes:
    """Encodes the raw bytes of a BYTES tensor."""
    encoded = [text.encode() for text in texts]
    return b"".join(LENGTH.pack(len(one)) + one for one in encoded)


def _texts(name: str, data: bytes) -> Iterator[str]:
    start = 0
    while start < len(data):
        if start + LENGTH.size > len(data):
            raise wrong(name, f"ends inside the length of an element, at byte {start}")
        (length,) = LENGTH.unpack_from(data, start)
        start += LENGTH.size
        if length > len(data) - start:
            raise wrong(
                name,
                f"has an element of {length} bytes at byte {start}; {len(data) - start} are left",
            )
        try:
            yield data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise wrong(name, f"has an element that is no UTF-8: {error}") from None
        start += length


def _flat(data: Sequence[Any]) -> Iterator[Any]:
    for item in data:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item
