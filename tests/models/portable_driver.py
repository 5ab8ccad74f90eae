"""A `ChunkedPrefillRunner` that tests drive call by call, so that every logit can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Optional

import numpy as np

from glm_multiuser import device
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.build import make_model
from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.config import EngineConfig
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.portable import ChunkedPrefillRunner
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import PromptChunk
from glm_multiuser.model_config import CausalConfig
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.weights import load_weights, weights_of

SHORT = 256


class PortableDriver:
    """MindSpore's operators with the weights of a folder; graphs are compiled when first needed.

    Args:
        folder: of the checkpoint of a causal model.
        lengths: that pieces of prompts are padded to; each is a graph.
        users_per_cell: default: all in one.
        seq_length: positions of each user.
        users: slots.
    """

    def __init__(
        self,
        folder: Path,
        lengths: Sequence[int],
        users_per_cell: Optional[int] = None,
        seq_length: int = SHORT,
        users: int = 4,
    ) -> None:
        engine = EngineConfig(users, seq_length, users_per_cell=users_per_cell)
        config = read_model_config(folder)
        assert isinstance(config, CausalConfig)

        def make() -> ChunkedPrefillRunner:
            device.configure("CPU", 0)
            model = make_model(config, PortableBackend())
            load_weights(folder, config)(weights_of(model), lambda done, total, what: None)
            return ChunkedPrefillRunner(model, engine)

        self.runner = DEVICE_THREAD.call(make)
        self.runner._chunk_lengths = tuple(lengths)
        self.runner._block_counts = self.runner._block_counts[-1:]
        self.config = config

    def request(self, token_ids: Sequence[int]) -> Request:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        room = self.runner.engine.seq_length - len(token_ids)
        vocab_size = self.config.vocab_size
        return Request(token_ids, params, object(), (), room, vocab_size, lambda event: None)

    def prefill(self, slot: int, request: Request) -> np.ndarray:
        """Takes the rest of the prompt in -> logits of its last token."""
        while not request.prompt_is_in:
            (chunk,) = self.runner.chunk_sizes([request], 0)
            pieces = {slot: PromptChunk(request, chunk)}
            results = DEVICE_THREAD.call(partial(self.runner.prefill, pieces))
            request.computed_tokens += chunk
        assert results.finite[0]
        request.output_token_ids.append(int(results.tokens[0]))
        logits: np.ndarray = results.logits([0])[0]
        return logits

    def decode(self, requests: dict[int, Request]) -> np.ndarray:
        """One step -> logits, a row for each request."""
        results = DEVICE_THREAD.call(lambda: self.runner.decode(requests))
        for request, token in zip(requests.values(), results.tokens):
            request.computed_tokens += 1
            request.output_token_ids.append(int(token))
        assert all(results.finite)
        logits: np.ndarray = results.logits(range(len(requests)))
        return logits
