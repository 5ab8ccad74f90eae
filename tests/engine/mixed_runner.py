"""The numpy model with prefill and decode rows in one call, as in `NativeRunner`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Optional, cast

from glm_multiuser import device
from glm_multiuser.engine.chunk_length import ChunkLength
from glm_multiuser.engine.layerwise_progress import LayerwiseProgress
from glm_multiuser.engine.native import NativeRunner
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import Step
from tests.engine.mock_runner import (
    SEQ_LENGTH,
    Call,
    Memory,
    MockResults,
    MockRunner,
    in_rows,
    written,
)


class MixedRunner(MockRunner):
    """A `MockRunner` that runs a whole step as one call, of the kind "mixed".

    Tokens overwrite only their own positions, as in the native kernels: later positions keep the
    data of an earlier user of the slot, which changes an answer if it is read.

    Args:
        chunk: prompt tokens per call, as for a causal model, with the last prompt cut at the limit;
            None: whole prompts, up to `WHOLE_ROOM` tokens, and longer ones a few layers per call.
        most_prompts: ignored.
    """

    WHOLE_ROOM = 12
    LAYERS = 3

    def __init__(
        self,
        users: int,
        before: Callable[[Call], None] = lambda call: None,
        most_prompts: int = 1,
        chunk: Optional[int] = None,
    ) -> None:
        super().__init__(users, before, most_prompts, chunk)
        self.chunk_length = ChunkLength(chunk or self.WHOLE_ROOM, is_fixed=True)
        self.model.config.num_layers = self.LAYERS

    def _lay_out(self, users: int) -> None:
        super()._lay_out(users)
        self._layerwise = LayerwiseProgress(self.LAYERS, self.WHOLE_ROOM)
        self._carried: tuple[list[Request], int] = ([], 0)
        """The prompts passing through the layers, and the number of completed layers."""

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        # The real one needs no more of a runner than there is here.
        return NativeRunner.chunk_sizes(cast(NativeRunner, self), prompts, decoding)

    def parts(self, step: Step) -> Sequence[Step]:
        return [step] if step.requests else []

    def run(self, step: Step) -> MockResults:
        with self._alone():
            self._enter(Call("mixed", step.requests))
            counts = {slot: piece.tokens for slot, piece in step.prompts.items()}
            longest = SEQ_LENGTH if self.chunk is None else self.chunk_length.longest
            assert sum(counts.values()) <= longest, "more tokens than the graph has rows"
            self._carry(step)
            rows = {}
            for slot, request in step.requests.items():
                if counts.get(slot, 1) == 0:
                    continue
                start = request.computed_tokens
                end = start + counts.get(slot, 1)
                token_ids = request.token_ids(start, end)
                assert len(token_ids) == end - start, "a step has tokens that do not exist"
                self.memory[slot, start:end] = written(token_ids)
                rows[slot] = self._logits(slot, request, end)
            answered = [*(rows[slot] for slot in step.answered), *self._scored(step.prompts)]
            assert len(answered) <= len(self.memory) + device.PROMPT_LOGITS, "more logits than rows"
            return MockResults(in_rows(answered))

    def _carry(self, step: Step) -> None:
        """Checks that prompts pass through every layer in order."""
        if self.chunk is not None or not step.prompts:
            return
        prompts = [piece.request for piece in step.prompts.values()]
        first, last = layers = self._layerwise.layers_of(prompts)
        self._layerwise.advance(prompts, layers)
        assert first == 0 or self._carried == (prompts, first), "layers were left out"
        assert last > first
        assert (last > self.LAYERS) == any(piece.tokens for piece in step.prompts.values())
        self._carried = prompts, last

    def _overwrite(self, slot: int, content: Memory) -> None:
        self.memory[slot, : len(content)] = content
