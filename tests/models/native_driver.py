"""A `NativeRunner` that tests drive step by step, so that every logit can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from glm_multiuser import backend_choice, device
from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.build import make_model
from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.config import MixedEngineConfig
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.native import NativeRunner
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import PromptChunk, Step
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.weights import Fill, load_weights, weights_of
from tests.models.golden_cases import Case, check_answer


def has_bits_of_float32(dtype: str) -> bool:
    """Whether weights of this type answer with the bits that the same numbers have in float32. With
    AMX only float16 ones do: products of the others are rounded elsewhere."""
    return library.level() != "amx" or dtype == "float16"


def assert_logits_of_float32(
    found: np.ndarray, expected: np.ndarray, dtype: str, inputs: str = "float32"
) -> None:
    """Weights of this type, and the same numbers in float32."""
    if has_bits_of_float32(dtype):
        assert found.tobytes() == expected.tobytes()
        return
    # Both may be 6e-5 off, as float32 may in the reference cases. Where an input is rounded to
    # bfloat16, it may be to the number beside.
    allowed = 1.2e-4 if inputs == "float32" else 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=allowed)


class NativeDriver:
    """Native kernels.

    Args:
        config: of the model.
        fill: puts the weights in.
        users: slots.
        seq_length: positions of each.
        chunk: tokens of prompts in one step.
        weight: type of the matrices.
        types: name of a matrix -> its type, where it is another one.
        inputs: type that inputs of products are rounded to.
        rotary: type in which the rotary tables are computed.
        users_per_cell: default: all in one.
        cache: type of keys and values; default: as an engine would choose it.
    """

    def __init__(
        self,
        config: AnyModelConfig,
        fill: Fill,
        users: int,
        seq_length: int,
        chunk: int = 16,
        weight: str = "float32",
        inputs: str = "float32",
        rotary: str = "float32",
        users_per_cell: Optional[int] = None,
        types: Optional[Mapping[str, str]] = None,
        cache: Optional[str] = None,
    ) -> None:
        self.config = config
        engine = MixedEngineConfig(
            users,
            seq_length,
            prefill_chunk=chunk,
            users_per_cell=users_per_cell,
            kernels="native",
            weight_dtype=weight,
            compute_dtype=inputs,
            cache_dtype=cache,
            weight_types=types or {},
        )
        backend = NativeBackend(
            weight, rotary, inputs, backend_choice.cache_dtype_of(engine), types or {}
        )

        def make() -> NativeRunner:
            device.configure("CPU", 0)
            model = make_model(config, backend)
            fill(weights_of(model), lambda done, total, what: None)
            return NativeRunner(model, engine)

        self.runner = DEVICE_THREAD.call(make)

    @classmethod
    def of_folder(cls, folder: Path, users: int, seq_length: int, **settings: Any) -> NativeDriver:
        """With the weights of a checkpoint."""
        config = read_model_config(folder)
        return cls(config, load_weights(folder, config), users, seq_length, **settings)

    def request(self, token_ids: Sequence[int]) -> Request:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        room = self.runner.engine.seq_length - len(token_ids)
        vocab_size = self.config.vocab_size
        return Request(token_ids, params, object(), (), room, vocab_size, lambda event: None)

    def step(self, requests: Mapping[int, Request], most: int = 1 << 30) -> dict[int, np.ndarray]:
        """One step of all, up to `most` tokens of each prompt -> logits, by slot, of the answered.

        A request whose prompt is in decodes.
        """
        entering = {slot: one for slot, one in requests.items() if not one.prompt_is_in}
        decoding = len(requests) - len(entering)
        counts = self.runner.chunk_sizes(list(entering.values()), decoding) if entering else []
        pieces = {
            slot: PromptChunk(one, min(count, most))
            for (slot, one), count in zip(entering.items(), counts)
        }
        step = Step(pieces, {slot: one for slot, one in requests.items() if slot not in entering})
        results = DEVICE_THREAD.call(lambda: self.runner.run(step))
        answered = step.answered
        for slot, piece in step.prompts.items():
            assert requests[slot] is piece.request
            piece.request.computed_tokens += piece.tokens
        for request in step.decodes.values():
            request.computed_tokens += 1
        assert all(results.finite)
        logits = results.logits(range(len(answered)))
        for token, request in zip(results.tokens, answered.values()):
            request.output_token_ids.append(int(token))
        return dict(zip(answered, logits))

    def neighbours(self, slots: Sequence[int]) -> dict[int, Request]:
        """Users who decode from random prompts."""
        random = np.random.default_rng(3)
        found = {}
        for slot in slots:
            request = self.request(random.integers(0, self.config.vocab_size, 9).tolist())
            while not request.output_token_ids:
                self.step({slot: request})
            found[slot] = request
        return found

    def answer(
        self,
        slot: int,
        request: Request,
        count: int,
        others: Mapping[int, Request] = {},
        most: int = 1 << 30,
    ) -> np.ndarray:
        """Up to `count` tokens, beside others -> the logits that each came from."""
        rows: list[np.ndarray] = []
        while len(request.output_token_ids) < count:
            rows += [
                logits
                for answered, logits in self.step({slot: request, **others}, most).items()
                if answered == slot
            ]
        return np.stack(rows)

    def answer_together(self, cases: Sequence[Case]) -> list[tuple[list[int], np.ndarray]]:
        """Every case its own user, all in the same steps -> tokens, and the first one's logits."""
        requests = [self.request(case.token_ids) for case in cases]
        running = dict(enumerate(requests))
        first: dict[int, np.ndarray] = {}
        while running:
            for slot, logits in self.step(running).items():
                first.setdefault(slot, logits)
                if len(requests[slot].output_token_ids) == len(cases[slot].greedy["fp32"]):
                    del running[slot]
        return [(one.output_token_ids, first[slot]) for slot, one in enumerate(requests)]

    def check(
        self,
        case: Case,
        slot: int,
        others: Mapping[int, Request] = {},
        held: Sequence[int] = (),
        numerics: str = "fp32",
    ) -> Request:
        """One case of the original code, from behind what the slot holds of it."""
        request = self.request(case.token_ids)
        request.reuse(held)
        rows = self.answer(slot, request, len(case.greedy[numerics]), others)
        check_answer(case, request.output_token_ids, list(rows), numerics)
        return request
