"""Making a model with its weights and all its graphs; runs on the device thread."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Callable

import numpy as np
from mindspore import Parameter, Tensor

from glm_multiuser import device
from glm_multiuser.checkpoint import load_checkpoint
from glm_multiuser.config import AnyModelConfig, EngineConfig
from glm_multiuser.engine.chunked_prompts import ChunkRunner
from glm_multiuser.engine.runner import GraphRunner
from glm_multiuser.engine.whole_prompts import WholePromptRunner
from glm_multiuser.models.layers import NUMPY_TYPES, Numerics
from glm_multiuser.models.registry import make_model
from glm_multiuser.progress import Progress

logger = logging.getLogger(__name__)

Fill = Callable[[Mapping[str, Parameter], Progress], None]
"""Puts values into a model's parameters."""


def build_runner(
    model_config: AnyModelConfig, config: EngineConfig, fill: Fill, progress: Progress
) -> GraphRunner:
    """A runner whose graphs are all compiled.

    Raises:
        ConfigError: settings that do not fit the model or the device.
        CheckpointError: from `fill`.
    """
    config.check_fits(model_config)
    device.configure(config.device_target, config.device_id)
    dtype = config.dtype or device.DEFAULT_DTYPE[config.device_target]
    model = make_model(model_config, Numerics.of(dtype, config.device_target))
    model.set_train(False)
    fill({parameter.name: parameter for parameter in model.get_parameters()}, progress)
    runner_class = ChunkRunner if model_config.is_causal else WholePromptRunner
    runner = runner_class(model, config)
    runner.compile(progress)
    if not runner.batch_invariant:
        logger.warning(
            "on this device the last bits of a row's logits depend on the batch; "
            "answers alone and under load agree up to rounding"
        )
    return runner


def load_weights(folder: Path, model_config: AnyModelConfig) -> Fill:
    """Fills parameters from a checkpoint folder, tensor by tensor."""

    def fill(parameters: Mapping[str, Parameter], progress: Progress) -> None:
        wanted = {
            name: (tuple(parameter.shape), np.dtype(NUMPY_TYPES[parameter.dtype]))
            for name, parameter in parameters.items()
        }
        load_checkpoint(
            folder,
            model_config,
            wanted,
            lambda name, values: parameters[name].set_data(Tensor(values)),
            progress,
        )

    return fill


def random_weights(seed: int) -> Fill:
    """Matrices of small normal numbers, norms and biases as a new model has them."""

    def fill(parameters: Mapping[str, Parameter], progress: Progress) -> None:
        random = np.random.default_rng(seed)
        for done, (name, parameter) in enumerate(parameters.items()):
            progress(done, len(parameters), name)
            if len(parameter.shape) > 1:
                values = random.standard_normal(parameter.shape, dtype=np.float32)
                values *= np.float32(0.02)
                parameter.set_data(Tensor(values.astype(NUMPY_TYPES[parameter.dtype])))

    return fill
