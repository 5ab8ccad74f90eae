"""The tensors of a served model, the same for every model: text in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

Element = Union[str, int]
"""An element of a BYTES or an INT16 tensor."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output, of shape [N, 1].

    Attributes:
        name: its name in requests.
        datatype: of KServe v2: "BYTES" (text in UTF-8) or "INT16".
        optional: whether a request may omit it.
    """

    name: str
    datatype: str = "BYTES"
    optional: bool = False


INPUTS = (
    TensorSpec("prompt"),
    TensorSpec("history", optional=True),
    TensorSpec("temperature", optional=True),
    TensorSpec("max_token", optional=True),
    TensorSpec("history_len", "INT16", optional=True),
)
OUTPUTS = (TensorSpec("response"), TensorSpec("history"))
