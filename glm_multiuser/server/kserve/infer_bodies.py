"""The JSON parts of inference requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Optional, Union

from pydantic import BaseModel, Field

from glm_multiuser.server.bodies import LongList, NotBoolean
from glm_multiuser.server.kserve.fields import Parameters

SHARED_MEMORY = "the client's shared memory is not read by this server"


class InputParameters(BaseModel):
    """How an input's data is sent."""

    binary_data_size: Annotated[
        Optional[int],
        Field(ge=0, description="Bytes after the JSON, instead of `data`."),
        NotBoolean,
    ] = None
    shared_memory_region: Annotated[Optional[str], Field(description="Not supported.")] = None


class Input(BaseModel):
    """One input tensor."""

    name: str
    datatype: str
    shape: Annotated[LongList[Annotated[int, NotBoolean]], Field(description="[N, 1] or [N].")]
    data: Annotated[
        Optional[list[Any]], Field(description="Elements in row-major order, nested or flat.")
    ] = None
    parameters: InputParameters = InputParameters()


class RequestedOutputParameters(BaseModel):
    """How to send an output's data."""

    binary_data: Annotated[
        Optional[bool], Field(description="As bytes after the JSON, instead of `data`.")
    ] = None
    shared_memory_region: Annotated[Optional[str], Field(description="Not supported.")] = None
    classification: Annotated[Optional[int], Field(description="Not supported."), NotBoolean] = None


class RequestedOutput(BaseModel):
    """One requested output tensor."""

    name: str
    parameters: RequestedOutputParameters = RequestedOutputParameters()


class InferParameters(Parameters):
    """`Parameters`, and the default encoding of the outputs."""

    binary_data_output: bool = False


class InferRequest(BaseModel):
    """Input tensors, and the requested outputs: all of them if none is named."""

    id: Optional[str] = None
    inputs: LongList[Input]
    outputs: LongList[RequestedOutput] = []
    parameters: InferParameters = InferParameters()


class OutputParameters(BaseModel):
    """How an output's data is sent."""

    binary_data_size: int


class Output(BaseModel):
    """One output tensor, with `data` or with bytes after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: Optional[list[Union[str, int]]] = None
    parameters: Optional[OutputParameters] = None


class InferResponse(BaseModel):
    """Output tensors."""

    model_name: str
    model_version: str
    id: Optional[str] = None
    outputs: list[Output]
