"""Making a model with its weights and all its graphs; runs on the device thread."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
from mindspore import Parameter, Tensor
from numpy.typing import NDArray

from glm_multiuser import device, memory
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.backends.native.packing import Packing
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.backends.portable.types import numpy_type
from glm_multiuser.backends.protocol import Backend
from glm_multiuser.checkpoint import check_tensors, load_checkpoint
from glm_multiuser.config import EngineConfig
from glm_multiuser.engine.native import NativeRunner
from glm_multiuser.engine.portable import ChunkedPrefillRunner, WholePrefillRunner
from glm_multiuser.engine.runner import GraphRunner
from glm_multiuser.model_config import AnyModelConfig, CausalConfig
from glm_multiuser.models.chatglm_6b import GLMForPreTraining
from glm_multiuser.models.decoder import DecoderForMultiUser
from glm_multiuser.models.multi_user import MultiUserModel
from glm_multiuser.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weight:
    """A parameter to fill.

    `shape`, the parameter's own unless it is packed, and `dtype` are those of the values that
    `assign` takes as they are; it also takes float32.
    """

    shape: tuple[int, ...]
    dtype: Any
    assign: Callable[[NDArray[Any]], None]


Fill = Callable[[Mapping[str, Weight], Progress], None]
"""Puts values into a model's weights, by their names."""


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from: a `Fill`, and the smallest type that holds its matrices as they are,
    "float32", "float16" or "bfloat16"."""

    fill: Fill
    dtype: str = "float32"

    def __call__(self, weights: Mapping[str, Weight], progress: Progress) -> None:
        self.fill(weights, progress)


def build_runner(
    model_config: AnyModelConfig, config: EngineConfig, source: WeightSource, progress: Progress
) -> GraphRunner:
    """A runner whose graphs are all compiled.

    Raises:
        ConfigError: settings that do not fit the model or the device.
        CheckpointError: from `source`.
    """
    config.check_fits(model_config)
    backend = choose_backend(memory.with_weight_dtype(config, source.dtype))
    if backend.weight_dtype not in (source.dtype, "float32"):
        logger.info("matrices are rounded from %s to %s", source.dtype, backend.weight_dtype)
    device.configure(config.device_target, config.device_id)
    model = make_model(model_config, backend)
    source(weights_of(model), progress)
    give_back_memory()
    runner = make_runner(model, config)
    runner.compile(progress)
    if not runner.batch_invariant:
        logger.warning(
            "on this device the last bits of a row's logits depend on the batch; "
            "answers alone and under load agree up to rounding"
        )
    return runner


def choose_backend(config: EngineConfig) -> Backend:
    """Native kernels where they are wanted and can be used.

    Raises:
        ConfigError: they are asked for and cannot be used, or something that only they can do.
    """
    memory.check_kernels(config)
    dtype, reason = memory.dtype_of(config), memory.portable_reason(config)
    if not reason:
        return NativeBackend(config.weight_dtype or dtype, input_dtype=config.compute_dtype)
    # Portable operators are the slower ones: worth a warning where they were not asked for.
    expected = memory.portable_by_choice(config) or config.device_target != "CPU"
    level = logging.INFO if expected else logging.WARNING
    logger.log(level, "native kernels are not used, but MindSpore's operators: %s", reason)
    return PortableBackend.of(dtype, config.device_target)


def make_model(config: AnyModelConfig, backend: Backend) -> MultiUserModel:
    """A model of this shape without users, its weights zero."""
    model = (
        DecoderForMultiUser(config, backend)
        if isinstance(config, CausalConfig)
        else GLMForPreTraining(config, backend)
    )
    model.set_train(False)
    return model


def make_runner(model: MultiUserModel, config: EngineConfig) -> GraphRunner:
    """The runner for the model's backend, and for how its prompts enter."""
    if model.backend.name == "native":
        return NativeRunner(model, config)
    is_causal = model.config.is_causal
    return ChunkedPrefillRunner(model, config) if is_causal else WholePrefillRunner(model, config)


def weights_of(model: MultiUserModel) -> dict[str, Weight]:
    """Every weight of a model, packed or not."""
    packings = {
        parameter.name: cell.packing
        for _, cell in model.cells_and_names()
        if hasattr(cell, "packing")
        for parameter in cell.get_parameters(expand=False)
        if parameter.ndim > 1
    }
    weights = {}
    for parameter in model.get_parameters():
        packing = packings.get(parameter.name)
        dtype, shape = numpy_type(parameter.dtype), tuple(parameter.shape)
        if packing is not None:
            dtype, shape = packing.unpacked_dtype, (packing.outputs, packing.inputs)
        weights[parameter.name] = Weight(shape, dtype, partial(_assign, parameter, packing))
    return weights


def _assign(parameter: Parameter, packing: Optional[Packing], values: NDArray[Any]) -> None:
    if packing is not None:
        values = packing.pack(values)
    else:
        values = values.astype(numpy_type(parameter.dtype), copy=False)
    # It keeps the array, where `Tensor` would copy it: the largest of a 6B model has gigabytes.
    parameter.set_data(Tensor.from_numpy(values))


def give_back_memory() -> None:
    """Returns to the system what loading left free between the weights, which glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def load_weights(folder: Path, model_config: AnyModelConfig) -> WeightSource:
    """Fills parameters from a checkpoint folder, tensor by tensor.

    Raises:
        CheckpointError: immediately, and not when the model was made, if its tensors do not fit.
    """
    dtype = check_tensors(folder, model_config)

    def fill(weights: Mapping[str, Weight], progress: Progress) -> None:
        wanted = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}

        def put(name: str, values: NDArray[Any]) -> None:
            weights[name].assign(values)

        load_checkpoint(folder, model_config, wanted, put, progress)

    return WeightSource(fill, dtype)


def random_weights(seed: int) -> WeightSource:
    """Matrices of small normal numbers, norms and biases as a new model has them."""

    def fill(weights: Mapping[str, Weight], progress: Progress) -> None:
        random = np.random.default_rng(seed)
        for done, (name, weight) in enumerate(weights.items()):
            progress(done, len(weights), name)
            if len(weight.shape) > 1:
                values = random.standard_normal(weight.shape, dtype=np.float32)
                values *= np.float32(0.02)
                weight.assign(values)

    return WeightSource(fill)
