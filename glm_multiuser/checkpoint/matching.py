"""Matches the tensors of a checkpoint to the model's parameters, and checks them beforehand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import DTypeLike

from glm_multiuser import bfloat16
from glm_multiuser.checkpoint.ckpt_file import find_ckpt, open_ckpt
from glm_multiuser.checkpoint.families import mindformers_placements, placements_of_names
from glm_multiuser.checkpoint.gguf.file import open_gguf
from glm_multiuser.checkpoint.gguf.find import find_gguf
from glm_multiuser.checkpoint.gguf.names import gguf_placements
from glm_multiuser.checkpoint.huggingface import has_weights, open_folder
from glm_multiuser.checkpoint.layouts.decoder import EMBEDDING
from glm_multiuser.checkpoint.placement import (
    BLOCK_BYTES,
    Placement,
    Places,
    Shapes,
    place_tensor,
    rows_of_tensor,
)
from glm_multiuser.checkpoint.stored_tensor import Array, RowIndex, StoredTensor
from glm_multiuser.errors import CheckpointError
from glm_multiuser.model_config import AnyModelConfig

NO_WEIGHT = re.compile(r"\.rotary(_pos)?_emb\.inv_freq$")
"""Buffers in published checkpoints; the rotary tables are computed instead."""

NO_WEIGHT_OF_MINDFORMERS = re.compile(
    r"""
    \.rotary(_pos)?_emb\.inv_freq$         # its converters take them over
    | (^|\.)\w*_past(\.|$)                 # caches, which are Parameters in MindFormers' GLM
    | \.(key|value)_cache$                 # and in its GLM2
    | ^\w+\.(transformer|lm_head)\.         # what an optimizer keeps for each weight
    | ^( global_step | epoch_num | step_num | global_batch_size | (current_)?learning_rate\w*
       | beta[12]_power | loss_scale | scale_sense | scale_window\w* | list_index
       | current_iterator_step | last_overflow_iterator_step | afactor_step )$
    """,
    re.VERBOSE,
)
"""Entries of a `.ckpt` that inference does not need.

A checkpoint from fine-tuning holds the state of optimizer and training loop besides the weights,
and can be loaded as it is. Other names are rejected: those of LoRA or p-tuning, for example,
change the answers.
"""


class MatchedParameter(NamedTuple):
    """A parameter and its tensors in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    sources: list[tuple[Placement, StoredTensor]]
    heads: int
    """Attention heads of the model."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that holds the values of all sources."""
        return np.result_type(*(tensor.numpy_dtype for _, tensor in self.sources))

    @property
    def stored_as(self) -> str:
        """ "float16" or "bfloat16" if all sources are, otherwise "float32"."""
        kinds = {tensor.dtype for _, tensor in self.sources}
        return {"F16": "float16", "BF16": "bfloat16"}.get("/".join(kinds), "float32")

    @property
    def kept_as(self) -> str:
        """As `stored_as`, or the common quantised type of all tensors of a matrix, as "q4_1"."""
        types = {tensor.block_type for _, tensor in self.sources}
        one = types.pop()
        if types or one is None or self.shape[-1] % one.values:
            return self.stored_as
        return one.name.lower()

    def read(self, dtype: DTypeLike) -> Array:
        """Reads the parameter in our layout into a new array.

        Raises:
            CheckpointError: values that are not finite, or out of range of `dtype`; a file that
                changed.
        """
        values: Array = np.empty(self.shape, dtype)
        for place, tensor in self.sources:
            try:
                with np.errstate(over="raise"):
                    place_tensor(values, place, self.heads, tensor)
            except FloatingPointError:
                kind = "bfloat16" if dtype == bfloat16.BITS else np.dtype(dtype)
                raise CheckpointError(
                    f"{tensor.name} in {tensor.path} has values beyond the range of {kind}"
                ) from None
        return values

    def rows(self, begin: int, end: int) -> Array:
        """Reads rows in our layout, [end - begin, ...]; a view of the file if possible.

        float16, or bfloat16 as `bfloat16.BITS`, if all of the parameter is, otherwise float32.
        Not checked for infinities and NaN.

        Raises:
            CheckpointError: a file that changed.
        """
        parts, bits = [], self.stored_as == "bfloat16"
        for tensor, index in self._parts(begin, end):
            rows = tensor.rows(index, bits)
            with np.errstate(over="ignore"):
                wanted = rows.dtype if self.stored_as != "float32" else np.float32
                parts.append(np.require(rows, wanted, ("C", "A")))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def blocks(self, begin: int, end: int) -> Array:
        """Reads rows of a matrix whose `kept_as` is quantised, as stored: uint8 [end - begin,
        blocks, bytes]; raises as `rows`."""
        parts = [tensor.blocks(index) for tensor, index in self._parts(begin, end)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[StoredTensor, RowIndex]]:
        """Yields the tensors with these rows of the parameter, in order, and their own row
        indices."""
        for place, tensor in sorted(self.sources, key=lambda source: source[0].rows or (0, 0)):
            first, after = place.rows or (0, self.shape[0])
            start, stop = max(begin, first) - first, min(end, after) - first
            if start < stop:
                yield tensor, rows_of_tensor(place, self.heads, start, stop, after - first)


def match(
    source: Path, config: AnyModelConfig, shapes: Shapes, ckpt: Optional[bool] = None
) -> list[MatchedParameter]:
    """Finds the tensors for parameters of these shapes, in the order of the checkpoint.

    Reads MindFormers' `.ckpt` files, a folder in Hugging Face layout, which is preferred if both
    exist and `ckpt` is None, or a GGUF file.

    Raises:
        CheckpointError: a tensor that is missing, unexpected or of another shape; a file that
            `open_folder`, `open_ckpt` or `open_gguf` rejects.
    """
    places: Places
    gguf = find_gguf(source) if not ckpt else None
    if ckpt is None:
        ckpt = gguf is None and bool(find_ckpt(source)) and not has_weights(source)
    if gguf is not None:
        file = open_gguf(gguf)
        tensors, places = file.tensors, gguf_placements(config, file)
    elif ckpt:
        places = mindformers_placements(config)
        tensors = open_ckpt(find_ckpt(source), NO_WEIGHT_OF_MINDFORMERS)
    else:
        stored = open_folder(source).items()
        tensors = {name: tensor for name, tensor in stored if not NO_WEIGHT.search(name)}
        places = placements_of_names(config, tensors)
        if config.tied:
            _check_tied(tensors, places)
    needed = {name: one.shape(shapes) for name, one in places.items() if one and one.name in shapes}
    # A parameter without a tensor in this layout is expected under its own name.
    placed = {place.name for place in places.values() if place}
    needed.update({name: shape for name, shape in shapes.items() if name not in placed})
    found: dict[str, MatchedParameter] = {}
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None and (name in places or _is_superfluous(name, tensors)):
            continue
        if place is None or place.name not in shapes:
            raise CheckpointError(
                f"{name} {list(tensor.shape)} in {tensor.path} has no place in this model"
            )
        if tensor.shape != needed[name]:
            raise CheckpointError(
                f"{name} in {tensor.path} has shape {list(tensor.shape)}; "
                f"this model needs {list(needed[name])}"
            )
        parameter = MatchedParameter(place.name, shapes[place.name], [], config.num_attention_heads)
        found.setdefault(place.name, parameter).sources.append((place, tensor))
    missing = sorted(name for name in needed if name not in tensors)
    if missing:
        raise CheckpointError(
            f"{source} lacks {missing[0]}, expected with shape {list(needed[missing[0]])}; "
            f"missing tensors: {len(missing)}"
        )
    return list(found.values())


def _check_tied(tensors: Mapping[str, StoredTensor], places: Places) -> None:
    """Rejects an output layer that differs from the embedding although the configuration ties
    them: transformers 4 ignores it, transformers 5 uses it."""
    embedding = next(one for one, place in places.items() if place and place.name == EMBEDDING)
    for output in [one for one, place in places.items() if place is None and one in tensors]:
        if embedding in tensors and not _same_values(tensors[embedding], tensors[output]):
            raise CheckpointError(
                f"{output} in {tensors[output].path} differs from {embedding}, and "
                "tie_word_embeddings of config.json is true; with false, both are used"
            )


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape or not one.shape:
        return False
    bits = one.dtype == other.dtype
    step = max(1, BLOCK_BYTES // (4 * max(1, math.prod(one.shape[1:]))))
    blocks = [slice(at, min(at + step, one.shape[0])) for at in range(0, one.shape[0], step)]
    return all(np.array_equal(one.rows(part, bits), other.rows(part, bits)) for part in blocks)


def _is_superfluous(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether it is an all-zero bias, which GPTQ files may have for every layer."""
    module, _, part = name.rpartition(".")
    weight = tensors.get(f"{module}.weight")
    is_int4 = weight is not None and weight.dtype == "int4"
    return is_int4 and part == "bias" and not tensors[name].read().any()


def common_dtype(matched: Iterable[MatchedParameter]) -> str:
    """Returns the smallest lossless type of all matrices: "float16", "bfloat16" or "float32"."""
    kinds = {one.stored_as for one in matched if len(one.shape) > 1}
    return kinds.pop() if len(kinds) == 1 else "float32"


def kept_types(matched: Iterable[MatchedParameter]) -> dict[str, str]:
    """Name of every matrix -> `MatchedParameter.kept_as`."""
    return {one.name: one.kept_as for one in matched if len(one.shape) > 1}
