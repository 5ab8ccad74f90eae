"""Decodes inference requests to tensors, and encodes tensors as responses."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Optional, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.kserve import tensors
from glm_multiuser.server.kserve.infer_bodies import (
    SHARED_MEMORY,
    InferRequest,
    InferResponse,
    Input,
    Output,
    OutputParameters,
)
from glm_multiuser.server.kserve.signature import INPUTS, OUTPUTS, Element
from glm_multiuser.server.kserve.tensors import wrong

JSON_LENGTH = "Inference-Header-Content-Length"
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
NUMBER = re.compile(r"[0-9]{1,18}")

Body = TypeVar("Body", bound=BaseModel)


def parse(body_class: type[Body], data: bytes) -> Body:
    """Parses JSON as a model class.

    Raises:
        RequestValidationError: invalid JSON, as FastAPI raises it for other bodies.
    """
    try:
        return body_class.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        located = [{**one, "loc": ("body", *one["loc"])} for one in problems]
        raise RequestValidationError(located) from None


def decompress(body: bytes, encoding: Optional[str], limit: int) -> bytes:
    """Returns the decompressed body.

    Args:
        encoding: the header Content-Encoding.
        limit: maximum number of bytes after decompression.

    Raises:
        APIError: 413, too large; 400, corrupt or of an unsupported encoding.
    """
    encoding = (encoding or "identity").lower()
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise wrong("Content-Encoding", f"is {encoding!r}; it may be 'gzip' or 'deflate'")
    decompressor = zlib.decompressobj(GZIP_OR_ZLIB)
    try:
        whole = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise wrong("body", f"is not {encoding}: {error}") from None
    if len(whole) > limit:
        raise APIError(
            413, "body_too_large", f"body: more than {limit} bytes when decompressed; it may have "
            f"{limit}"
        )  # fmt: skip
    if not decompressor.eof or decompressor.unused_data:
        raise wrong("body", f"is not one whole {encoding} stream")
    return whole


def split(body: bytes, json_length: Optional[str]) -> tuple[bytes, bytes]:
    """Returns the JSON and the bytes after it.

    Args:
        json_length: the header Inference-Header-Content-Length; without it, all is JSON.

    Raises:
        APIError: 400, the header is not a number, or exceeds the body.
    """
    if json_length is None:
        return body, b""
    if not NUMBER.fullmatch(json_length) or int(json_length) > len(body):
        raise wrong(
            JSON_LENGTH,
            f"is {json_length!r}; the body has {len(body)} bytes, and the JSON is a part of it",
        )
    return body[: int(json_length)], body[int(json_length) :]


def read_inputs(
    inputs: Sequence[Input], binary: bytes, most: int
) -> tuple[dict[str, list[Element]], list[int]]:
    """Returns {name: N elements}, and the shape of the outputs.

    Args:
        inputs: their descriptions in the JSON.
        binary: their concatenated raw bytes.
        most: maximum of N.

    Raises:
        APIError: 400, an unknown, missing or duplicate tensor, or one that contradicts its shape.
    """
    specs = {spec.name: spec for spec in INPUTS}
    elements: dict[str, list[Element]] = {}
    shapes: dict[str, list[int]] = {}
    for tensor in inputs:
        spec = specs.get(tensor.name)
        if spec is None or tensor.name in elements:
            problem = "is given twice" if spec else f"is no input; there are {', '.join(specs)}"
            raise wrong(tensor.name, problem)
        if tensor.datatype != spec.datatype:
            raise wrong(
                tensor.name, f"has datatype {tensor.datatype!r}; it must be {spec.datatype!r}"
            )
        size = tensor.parameters.binary_data_size
        if size is not None and size > len(binary):
            raise wrong(
                tensor.name, f"has binary_data_size {size}; {len(binary)} bytes are left for it"
            )
        elements[tensor.name] = _elements(tensor, binary[: size or 0])
        binary = binary[size or 0 :]
        shapes[tensor.name] = _checked_shape(tensor, len(elements[tensor.name]), most)
    if binary:
        raise wrong("body", f"has {len(binary)} bytes that belong to no input")
    for spec in INPUTS:
        if not spec.optional and spec.name not in elements:
            raise wrong(spec.name, "is missing; it is the one input that must be there")
    count = len(elements["prompt"])
    for name, values in elements.items():
        if len(values) != count:
            raise wrong(name, f"has {len(values)} elements; prompt has {count}")
    return elements, shapes["prompt"]


def _elements(tensor: Input, binary: bytes) -> list[Element]:
    if tensor.parameters.shared_memory_region is not None:
        raise wrong(tensor.name, f"has a shared_memory_region; {SHARED_MEMORY}")
    in_binary = tensor.parameters.binary_data_size is not None
    if in_binary == (tensor.data is not None):
        raise wrong(tensor.name, "must have either data or a binary_data_size")
    if tensor.data is not None:
        return tensors.from_json(tensor.name, tensor.datatype, tensor.data)
    return tensors.from_binary(tensor.name, tensor.datatype, binary)


def _checked_shape(tensor: Input, count: int, most: int) -> list[int]:
    shape = tensor.shape
    if len(shape) not in (1, 2) or shape[1:] not in ([], [1]) or not 1 <= shape[0] <= most:
        raise wrong(tensor.name, f"has shape {shape}; it must be [N, 1] or [N], N from 1 to {most}")
    if shape[0] != count:
        raise wrong(tensor.name, f"has shape {shape} and {count} elements")
    return shape


def wanted_outputs(request: InferRequest) -> dict[str, bool]:
    """Returns {name: whether as binary data}, in the order of the request.

    Raises:
        APIError: 400, an unknown or duplicate output, or an unsupported encoding.
    """
    known = [spec.name for spec in OUTPUTS]
    default = request.parameters.binary_data_output
    wanted: dict[str, bool] = {}
    for output in request.outputs:
        if output.name not in known or output.name in wanted:
            problem = "is given twice" if output.name in wanted else "is no output"
            raise wrong(output.name, f"{problem}; there are {', '.join(known)}")
        if output.parameters.shared_memory_region is not None:
            raise wrong(output.name, f"has a shared_memory_region; {SHARED_MEMORY}")
        if output.parameters.classification:
            raise wrong(output.name, "is text; it has no classification")
        binary = output.parameters.binary_data
        wanted[output.name] = default if binary is None else binary
    return wanted or dict.fromkeys(known, default)


def response_of(
    head: InferResponse,
    texts: Mapping[str, Sequence[str]],
    shape: list[int],
    wanted: Mapping[str, bool],
) -> Response:
    """Returns the response with its tensors.

    Args:
        head: names of the model; its outputs are filled in here.
        texts: the elements of every output.
        shape: of every output.
        wanted: from `wanted_outputs`.
    """
    raw = {name: tensors.to_binary(texts[name]) for name, binary in wanted.items() if binary}
    for name in wanted:
        output = Output(name=name, datatype="BYTES", shape=shape)
        if name in raw:
            output.parameters = OutputParameters(binary_data_size=len(raw[name]))
        else:
            output.data = list(texts[name])
        head.outputs.append(output)
    json = head.model_dump_json(exclude_none=True).encode()
    if not raw:
        return Response(json, media_type="application/json")
    return Response(
        json + b"".join(raw.values()),
        media_type="application/octet-stream",
        headers={JSON_LENGTH: str(len(json))},
    )
