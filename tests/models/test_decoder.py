"""What a causal model can be made of, also what no family here has: both backends compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from glm_multiuser import device
from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.build import make_model
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.portable_graphs import WholeSequences
from glm_multiuser.model_config import AnyModelConfig, CausalConfig, RopeScaling
from glm_multiuser.progress import Progress
from glm_multiuser.weights import Weight, random_weights, weights_of
from tests.engine.small_model import CAUSAL, MODEL
from tests.models.golden_cases import worst
from tests.models.native_driver import NativeDriver
from tests.models.numpy_decoder import logits_of

TOLERANCE = 1e-4

BIASES: dict[str, Any] = {"qkv_bias": True, "dense_bias": True, "mlp_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "nothing special": {"qkv_bias": False},
    "every bias": BIASES,
    "layer norm": {"norm": "layer", **BIASES},
    "norms after": {"norm_position": "after"},
    "norms at both places": {"norm_position": "both"},
    "layer norms after": {"norm": "layer", "norm_position": "after", **BIASES},
    "layer norms at both places": {"norm": "layer", "norm_position": "both"},
    "query and key norm": {"query_key_norm": True, "norm_position": "both", **BIASES},
    "tied": {"tied": True, "head_dim": 24, "rotary_dim": 24},
    "half of each head turns": {"rotary_dim": 8, "rotary_interleaved": True},
    "linear scaling": {"rope_scaling": RopeScaling("linear", 4.0)},
}


def random_arrays(config: CausalConfig) -> dict[str, np.ndarray]:
    """For every parameter; vectors are not what a new model has."""
    random = np.random.default_rng(0)
    arrays = {}
    for name, shape in parameter_shapes(config).items():
        arrays[name] = random.standard_normal(shape, dtype=np.float32) / np.float32(4)
        if "norm" in name and not name.endswith("beta"):
            arrays[name] += 1
    return arrays


class FillWith:
    """Puts arrays into the parameters of their names."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __call__(self, weights: Mapping[str, Weight], progress: Progress) -> None:
        assert weights.keys() == self.arrays.keys()
        for name, weight in weights.items():
            weight.assign(self.arrays[name])


def whole_sequences(config: CausalConfig, fill: FillWith, sequences: list[list[int]]) -> np.ndarray:
    """Portable logits, [sequences, tokens, vocab_size]."""

    def run() -> np.ndarray:
        device.configure("CPU", 0)
        model = make_model(config, PortableBackend())
        fill(weights_of(model), lambda done, total, what: None)
        token_ids = np.array(sequences)
        positions = np.tile(np.arange(token_ids.shape[1]), len(sequences))
        inputs = [Tensor(values, ms.int32) for values in (token_ids, positions)]
        logits: np.ndarray = WholeSequences(model)(*inputs).asnumpy()
        return logits.reshape(*token_ids.shape, -1)

    return DEVICE_THREAD.call(run)


@pytest.mark.parametrize("name", MODELS)
def test_both_backends_compute_every_model(name: str) -> None:
    config = replace(CAUSAL, **MODELS[name])
    arrays = random_arrays(config)
    fill = FillWith(arrays)
    prompts = [[5, 80, 33, 7, 7, 61, 2], [9, 0, 1, 64, 3, 3, 12]]
    driver = NativeDriver(config, fill, users=2, seq_length=32, chunk=4)
    requests = [driver.request(prompt) for prompt in prompts]
    rows = [driver.answer(slot, request, 6) for slot, request in enumerate(requests)]
    sequences = [[*one.prompt_token_ids, *one.output_token_ids[:-1]] for one in requests]
    expected = np.stack([logits_of(config, arrays, sequence) for sequence in sequences])
    assert np.abs(expected).max() > 1
    assert worst(whole_sequences(config, fill, sequences), expected) <= TOLERANCE
    assert worst(np.stack(rows), expected[:, len(prompts[0]) - 1 :]) <= TOLERANCE


@pytest.mark.parametrize("config", [MODEL, CAUSAL], ids=["chatglm_6b", "causal"])
def test_layers_differ_in_parameters_alone(config: AnyModelConfig) -> None:
    """They share a graph while it is compiled."""

    def constants() -> list[dict[tuple[str, str], object]]:
        device.configure("CPU", 0)
        model = make_model(config, PortableBackend())
        model.set_layout(CellLayout.plan(3, 32, 16, users_per_cell=2))
        return [
            {
                (name, key): value
                for name, cell in layer.cells_and_names()
                for key, value in vars(cell).items()
                if isinstance(value, (bool, int, float, str, tuple)) and not key.startswith("_")
            }
            for layer in model.layer_cells()
        ]

    first, *others = DEVICE_THREAD.call(constants)
    assert ("attend", "head_dim") in first
    assert others
    assert all(one == first for one in others)


@pytest.mark.parametrize("config", [MODEL, CAUSAL], ids=["chatglm_6b", "causal"])
def test_whole_sequences_have_a_gradient_of_every_parameter(config: AnyModelConfig) -> None:
    positions = np.zeros((2, 14) if config is MODEL else 14)
    mask = Tensor(np.zeros((2, 1, 7, 7), np.float32)) if config is MODEL else None

    def run() -> dict[str, float]:
        device.configure("CPU", 0)
        model = make_model(config, PortableBackend())
        random_weights(1)(weights_of(model), lambda done, total, what: None)
        logits = WholeSequences(model)
        target = Tensor(np.arange(14), ms.int32)

        def loss(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return ops.cross_entropy(logits(input_ids, position_ids, mask), target)

        parameters = model.trainable_params()
        inputs = Tensor(np.arange(14).reshape(2, 7), ms.int32), Tensor(positions, ms.int32)
        _, gradients = ops.value_and_grad(loss, None, parameters)(*inputs)
        return {
            parameter.name: float(np.abs(gradient.asnumpy()).max())
            for parameter, gradient in zip(parameters, gradients)
        }

    largest = DEVICE_THREAD.call(run)
    assert largest.keys() == parameter_shapes(config).keys()
    assert all(np.isfinite(one) and one > 0 for one in largest.values()), largest


def test_every_choice_makes_another_model() -> None:
    sequence = [5, 80, 33, 7, 7, 61, 2]
    random = random_arrays(replace(CAUSAL, norm_position="both", query_key_norm=True, **BIASES))
    found = []
    for changes in MODELS.values():
        if changes.get("norm") != "layer" and "head_dim" not in changes:
            found.append(logits_of(replace(CAUSAL, **changes), random, sequence))
    for number, one in enumerate(found):
        for other in found[:number]:
            assert worst(one, other) > 0.1
