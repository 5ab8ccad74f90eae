"""Builds a model, loads its weights, and compiles its graphs; runs on the device thread."""

from __future__ import annotations

import ctypes
import logging
from threading import Thread
from typing import Optional

from glm_multiuser import backend_choice, device, memory
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.backends.native.weight_types import described, types_in_groups
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.backends.protocol import Backend
from glm_multiuser.checkpoint.stored_tensor import Sizes
from glm_multiuser.config import EngineConfig
from glm_multiuser.engine.graph_runner import GraphRunner
from glm_multiuser.engine.native import NativeRunner
from glm_multiuser.engine.portable import ChunkedPrefillRunner, WholePrefillRunner
from glm_multiuser.model_config import AnyModelConfig, CausalConfig
from glm_multiuser.models.chatglm_6b import GLMForPreTraining
from glm_multiuser.models.decoder import DecoderForMultiUser
from glm_multiuser.models.multi_user import MultiUserModel
from glm_multiuser.progress import Progress
from glm_multiuser.version import own_version
from glm_multiuser.weight_cache import WeightCache, cache_folder
from glm_multiuser.weights import WeightSource, allocate, weights_of

logger = logging.getLogger(__name__)


def build_runner(
    model_config: AnyModelConfig, config: EngineConfig, source: WeightSource, progress: Progress
) -> tuple[GraphRunner, Optional[Thread]]:
    """Returns a runner with all graphs compiled, and the thread that writes its packed weights.

    Raises:
        ConfigError: settings that do not fit the model or the device.
        CheckpointError: from `source`.
    """
    config.check_fits(model_config)
    stored = types_in_groups(source.types)
    backend = choose_backend(
        backend_choice.with_weight_dtype(config, model_config, source.dtype, source.types)
    )
    memory.check_cache_memory(model_config, config)
    before, after = described(source.dtype, stored), backend.kept_as
    if backend.weight_dtype != "float32" and after != before:
        logger.info("matrices are rounded from %s to %s", before, after)
    device.configure(config.device_target, config.device_id)
    model = make_model(model_config, backend)
    saving = fill(model, source, config, progress)
    give_back_memory()
    runner = make_runner(model, config)
    runner.compile(progress)
    if not runner.batch_invariant:
        logger.warning(
            "on this device the last bits of a row's logits depend on the batch; "
            "answers alone and under load agree up to rounding"
        )
    return runner, saving


def fill(
    model: MultiUserModel, source: WeightSource, config: EngineConfig, progress: Progress
) -> Optional[Thread]:
    """Loads the weights from `source`. The native backend prefers packed weights on disk; if there
    are none, the returned thread writes them."""
    if model.backend.name != "native":
        source(weights_of(model), progress)
        return None
    sizes = {name: weight.stored for name, weight in weights_of(model).items()}
    cache = weight_cache_of(model, source, config, sizes)
    arrays = cache.load(progress) if cache else None
    if arrays is not None:
        for name, weight in weights_of(model).items():
            weight.keep(arrays[name])
        return None
    arrays = allocate(sizes)
    source(weights_of(model, arrays), progress)
    if not cache:
        return None
    # A daemon: neither start-up nor exit waits for the write.
    saving = Thread(target=cache.save, args=(arrays,), name="packed-weights", daemon=True)
    saving.start()
    return saving


def weight_cache_of(
    model: MultiUserModel, source: WeightSource, config: EngineConfig, sizes: Sizes
) -> Optional[WeightCache]:
    """Returns the cache of this model's packed weights; None if it is off."""
    folder = cache_folder(config.weight_cache)
    if folder is None or not source.files:
        return None
    settings = {
        "version": own_version(),
        "model": repr(model.config),
        "weight_dtype": model.backend.kept_as,
    }
    return WeightCache.of(folder, source.files, settings, sizes)


def choose_backend(config: EngineConfig) -> Backend:
    """Selects native kernels if they are enabled and available.

    Raises:
        ConfigError: native kernels are unavailable, and a setting requires them.
    """
    backend_choice.check_kernels(config)
    dtype, reason = backend_choice.dtype_of(config), backend_choice.portable_reason(config)
    if not reason:
        return NativeBackend(
            config.weight_dtype or dtype,
            input_dtype=config.compute_dtype,
            cache_dtype=backend_choice.cache_dtype_of(config),
            weight_types=backend_choice.weight_types_of(config),
            preallocated=config.preallocate_caches,
        )
    # Portable operators are slower, so falling back to them is worth a warning.
    level = logging.INFO if backend_choice.portable_by_choice(config) else logging.WARNING
    logger.log(level, "native kernels are not used, but MindSpore's operators: %s", reason)
    return PortableBackend.of(dtype, config.device_target)


def make_model(config: AnyModelConfig, backend: Backend) -> MultiUserModel:
    """Creates a model with zero weights and no users."""
    model = (
        DecoderForMultiUser(config, backend)
        if isinstance(config, CausalConfig)
        else GLMForPreTraining(config, backend)
    )
    backend.set_weight_types(model)
    model.set_train(False)
    return model


def make_runner(model: MultiUserModel, config: EngineConfig) -> GraphRunner:
    """Creates the runner for the model's backend and its kind of prefill."""
    if model.backend.name == "native":
        return NativeRunner(model, config)
    is_causal = model.config.is_causal
    return ChunkedPrefillRunner(model, config) if is_causal else WholePrefillRunner(model, config)


def give_back_memory() -> None:
    """Returns free memory to the system, which glibc would keep after loading."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
