"""Making a model with its weights and all its graphs; runs on the device thread."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np
from mindspore import Parameter, Tensor
from numpy.typing import NDArray

from glm_multiuser import device
from glm_multiuser.checkpoint import load_checkpoint
from glm_multiuser.config import AnyModelConfig, EngineConfig
from glm_multiuser.engine.chunked_prompts import ChunkRunner
from glm_multiuser.engine.one_graph import OneGraphRunner
from glm_multiuser.engine.runner import GraphRunner
from glm_multiuser.engine.whole_prompts import WholePromptRunner
from glm_multiuser.kernels import library
from glm_multiuser.kernels.packing import Packing
from glm_multiuser.models.layers import NUMPY_TYPES, Numerics
from glm_multiuser.models.registry import make_model
from glm_multiuser.models.users import MultiUserModel
from glm_multiuser.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weight:
    """A parameter to fill.

    Attributes:
        shape: of the values; the parameter's own unless it is packed.
        dtype: of the values.
        assign: takes them.
    """

    shape: tuple[int, ...]
    dtype: Any
    assign: Callable[[NDArray[Any]], None]


Fill = Callable[[Mapping[str, Weight], Progress], None]
"""Puts values into a model's weights, by their names."""


def build_runner(
    model_config: AnyModelConfig, config: EngineConfig, fill: Fill, progress: Progress
) -> GraphRunner:
    """A runner whose graphs are all compiled.

    Raises:
        ConfigError: settings that do not fit the model or the device.
        CheckpointError: from `fill`.
    """
    config.check_fits(model_config)
    numerics = choose_numerics(config)
    device.configure(config.device_target, config.device_id)
    model = make_model(model_config, numerics)
    model.set_train(False)
    fill(weights_of(model), progress)
    give_back_memory()
    runner = make_runner(model, config)
    runner.compile(progress)
    if not runner.batch_invariant:
        logger.warning(
            "on this device the last bits of a row's logits depend on the batch; "
            "answers alone and under load agree up to rounding"
        )
    return runner


def choose_numerics(config: EngineConfig) -> Numerics:
    """Native kernels where they are wanted and can be used.

    Raises:
        ConfigError: they are asked for and cannot be used, or something that only they can do.
    """
    numerics = Numerics.of(
        config.dtype or device.DEFAULT_DTYPE[config.device_target], config.device_target
    )
    choice = library.portable_by_choice(config.kernels, numerics.compute)
    reason = choice or library.why_not(config.device_target)
    if not reason:
        return replace(numerics, native=True, weight=config.weight_dtype or "float32")
    library.check_not_needed(config.kernels, config.weight_dtype, numerics.compute, reason)
    # Worth a line that is seen where nobody asked for it: these operators are the slower ones.
    expected = choice or config.device_target != "CPU"
    level = logging.INFO if expected else logging.WARNING
    logger.log(level, "native kernels are not used, but MindSpore's operators: %s", reason)
    return numerics


def make_runner(model: MultiUserModel, config: EngineConfig) -> GraphRunner:
    if model.numerics.native:
        return OneGraphRunner(model, config)
    return (
        ChunkRunner(model, config) if model.config.is_causal else WholePromptRunner(model, config)
    )


def weights_of(model: MultiUserModel) -> dict[str, Weight]:
    """Every weight of a model, packed or not."""
    packings = model.packings()
    weights = {}
    for parameter in model.get_parameters():
        name, packing = parameter.name, packings.get(parameter.name)
        if packing is None:
            dtype, shape = np.dtype(NUMPY_TYPES[parameter.dtype]), tuple(parameter.shape)
            assign = partial(_assign, parameter)
        else:
            dtype, shape = np.dtype(np.float32), (packing.outputs, packing.inputs)
            assign = partial(_pack, parameter, packing)
        weights[name] = Weight(shape, dtype, assign)
    return weights


def _assign(parameter: Parameter, values: NDArray[Any]) -> None:
    # It keeps the array, where `Tensor` would copy it: the largest of a 6B model has gigabytes.
    parameter.set_data(Tensor.from_numpy(values))


def _pack(parameter: Parameter, packing: Packing, values: NDArray[Any]) -> None:
    _assign(parameter, packing.pack(values))


def give_back_memory() -> None:
    """Returns to the system what loading left free between the weights, which glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def load_weights(folder: Path, model_config: AnyModelConfig) -> Fill:
    """Fills parameters from a checkpoint folder, tensor by tensor."""

    def fill(weights: Mapping[str, Weight], progress: Progress) -> None:
        wanted = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
        load_checkpoint(
            folder,
            model_config,
            wanted,
            lambda name, values: weights[name].assign(values),
            progress,
        )

    return fill


def random_weights(seed: int) -> Fill:
    """Matrices of small normal numbers, norms and biases as a new model has them."""

    def fill(weights: Mapping[str, Weight], progress: Progress) -> None:
        random = np.random.default_rng(seed)
        for done, (name, weight) in enumerate(weights.items()):
            progress(done, len(weights), name)
            if len(weight.shape) > 1:
                values = random.standard_normal(weight.shape, dtype=np.float32)
                values *= np.float32(0.02)
                weight.assign(values.astype(weight.dtype))

    return fill
