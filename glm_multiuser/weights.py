"""Sources of weights, and loading into a model's parameters."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
from mindspore import Parameter, Tensor

from glm_multiuser.backends.native.group_packing import GROUP_TYPES, AnyPacking
from glm_multiuser.backends.native.packing import BLOCK_BYTES, PANEL
from glm_multiuser.backends.portable.types import numpy_type
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.checkpoint.matching import MatchedParameter, common_dtype, kept_types, match
from glm_multiuser.checkpoint.stored_tensor import Array, Sizes, byte_size
from glm_multiuser.device import cores
from glm_multiuser.errors import CheckpointError
from glm_multiuser.huge_pages import advise_huge_pages
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.models.multi_user import MultiUserModel
from glm_multiuser.progress import Progress

Rows = Callable[[int, int], Array]
"""Returns rows [begin, end) of a matrix, of a type that `pack_rows` accepts."""

ALIGNMENT = 64
"""Bytes of a cache line; vectors across two lines take twice as long to read."""

MIB = 1 << 20


@dataclass(frozen=True)
class Weight:
    """A parameter to load.

    Attributes:
        parameter: its memory is replaced.
        packing: memory layout of a matrix of the native backend; None: unpacked.
        memory: memory for the parameter; None: newly allocated.
    """

    parameter: Parameter
    packing: Optional[AnyPacking]
    memory: Optional[Array] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values; weights are [outputs, inputs]."""
        if self.packing is not None:
            return self.packing.outputs, self.packing.inputs
        return tuple(self.parameter.shape)

    @property
    def dtype(self) -> Any:
        """Type of values that are stored without conversion."""
        return self.packing.unpacked_dtype if self.packing else numpy_type(self.parameter.dtype)

    @property
    def stored(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of the parameter's own memory."""
        if self.packing is not None:
            return self.packing.shape, self.packing.array_dtype
        return self.shape, np.dtype(self.dtype)

    def assign(self, values: Array) -> None:
        """Stores values of `shape`, of type `dtype` or float32."""
        if self.packing is None:
            self.keep(values.astype(self.dtype, copy=False))
            return
        values = np.ascontiguousarray(values)
        if values.dtype not in (np.float32, self.dtype):
            values = values.astype(np.float32)
        with ThreadPoolExecutor(1) as pool:
            for _ in self.assign_rows(lambda begin, end: values[begin:end], pool):
                pass

    def assign_rows(self, rows: Rows, pool: ThreadPoolExecutor) -> Iterator[int]:
        """Packs a matrix, in blocks of rows on the threads of `pool`.

        Yields:
            Bytes of packed memory that each block filled.

        Raises:
            FloatingPointError: values that are not finite or out of range.
        """
        packing = self.packing
        if packing is None:
            raise ValueError(f"{self.parameter.name} is not packed")
        packed = self.memory if self.memory is not None else allocate({"": self.stored})[""]
        step = max(1, BLOCK_BYTES // (4 * PANEL * packing.inputs))

        def fill(first: int) -> tuple[bool, int]:
            panels = packed[first : first + step]
            end = min(packing.outputs, (first + step) * PANEL)
            return packing.pack_rows(rows(first * PANEL, end), panels), panels.nbytes

        for finite, done in pool.map(fill, range(0, len(packed), step)):
            if not finite:
                raise FloatingPointError(f"{self.parameter.name} has numbers out of range")
            yield done
        self.keep(packed)

    def keep(self, stored: Array) -> None:
        """Uses an array of `stored`'s shape and type as the parameter's memory, without a copy."""
        if self.memory is not None and stored is not self.memory:
            np.copyto(self.memory, stored)
            stored = self.memory
        # `Tensor` would copy it, and the largest of a 6B model has gigabytes.
        self.parameter.set_data(Tensor.from_numpy(stored))


Fill = Callable[[Mapping[str, Weight], Progress], None]
"""Loads values into a model's weights, by name."""


@dataclass(frozen=True)
class WeightSource:
    """A source of weights.

    Attributes:
        fill: loads them.
        dtype: the smallest type that holds its matrices losslessly: "float32", "float16" or
            "bfloat16".
        files: weight files, and the one that describes them; empty for generated weights.
        types: name of each matrix -> its stored type.
    """

    fill: Fill
    dtype: str = "float32"
    files: Sequence[Path] = ()
    types: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, weights: Mapping[str, Weight], progress: Progress) -> None:
        self.fill(weights, progress)


def weights_of(
    model: MultiUserModel, memory: Optional[Mapping[str, Array]] = None
) -> dict[str, Weight]:
    """Returns all weights of a model, packed or not; `memory` maps names to their memory."""
    packings = {
        parameter.name: cell.packing
        for _, cell in model.cells_and_names()
        if hasattr(cell, "packing")
        for parameter in cell.get_parameters(expand=False)
        if parameter.ndim > 1
    }
    memory = memory or {}
    return {
        one.name: Weight(one, packings.get(one.name), memory.get(one.name))
        for one in model.trainable_params()
    }


def allocate(sizes: Sizes) -> dict[str, Array]:
    """Allocates arrays in one mapping, with huge pages if available, for fast reads in steps. The
    memory is not touched: pages that are never written are zero and take no memory."""
    places, end = {}, 0
    for name, (shape, dtype) in sizes.items():
        places[name] = end
        end += -(-byte_size(shape, dtype) // ALIGNMENT) * ALIGNMENT
    memory = mmap.mmap(-1, max(1, end), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(memory, True)
    return {
        name: np.frombuffer(memory, dtype, math.prod(shape), places[name]).reshape(shape)
        for name, (shape, dtype) in sizes.items()
    }


def load_weights(folder: Path, model_config: AnyModelConfig) -> WeightSource:
    """Returns the weights of a checkpoint folder or GGUF file, read and packed on all cores.

    Raises:
        CheckpointError: the tensors do not fit; raised here, before the model is built.
    """
    matched = match(folder, model_config, parameter_shapes(model_config))
    files = sorted({tensor.path for one in matched for _, tensor in one.sources})
    config = Path(folder) / "config.json"
    if config.is_file():  # its `quantization_config` defines how weights are decoded
        files.append(config)

    def fill(weights: Mapping[str, Weight], progress: Progress) -> None:
        wanted = [one for one in matched if one.name in weights]
        total = sum(byte_size(*weights[one.name].stored) for one in wanted)
        done = 0
        with ThreadPoolExecutor(cores()) as pool:
            for one in wanted:
                for part in _parts(one, weights[one.name], pool):
                    progress(done // MIB, -(-total // MIB), "MiB of weights")
                    done += part

    return WeightSource(fill, common_dtype(matched), files, kept_types(matched))


def _parts(matched: MatchedParameter, weight: Weight, pool: ThreadPoolExecutor) -> Iterator[int]:
    """Loads one weight, and yields the bytes of each part."""
    if weight.packing is None:
        weight.keep(matched.read(weight.dtype))
        yield byte_size(*weight.stored)
        return
    dtype = weight.packing.dtype
    as_stored = dtype in GROUP_TYPES and dtype == matched.kept_as
    try:
        yield from weight.assign_rows(matched.blocks if as_stored else matched.rows, pool)
    except FloatingPointError as error:
        matched.read(weight.dtype)  # raises an error that names the tensor
        raise CheckpointError(str(error)) from error


def random_weights(seed: int) -> WeightSource:
    """Matrices with small normally distributed values; norms and biases as initialised."""

    def fill(weights: Mapping[str, Weight], progress: Progress) -> None:
        random = np.random.default_rng(seed)
        for done, (name, weight) in enumerate(weights.items()):
            progress(done, len(weights), name)
            if len(weight.shape) > 1:
                values = random.standard_normal(weight.shape, dtype=np.float32)
                values *= np.float32(0.02)
                weight.assign(values)

    return WeightSource(fill)
