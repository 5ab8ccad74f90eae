"""The graph of the native runner: one operator, which runs the recorded program of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.operators import take_rows
from glm_multiuser.backends.native.program import CapturedProgram, Program, Value
from glm_multiuser.mindspore_internals import cells_as_functions, parameter_of
from glm_multiuser.models.batch import RaggedBatch
from glm_multiuser.models.multi_user import MultiUserModel


class NativeForward(nn.Cell):
    """Any tokens of any users in one step; the graph has a fixed row count.

    It is one operator: the model's cells are recorded once, as a program. Inputs and results of a
    step are Parameters, like caches and weights, so the addresses of all arguments are fixed. The
    graph runs once; the launch of its operator is captured and replayed in every step, like a CUDA
    graph, which saves 0.5 ms per step.

    Args:
        model: with allocated caches.
        saved: as in `LayerwisePrefill`.
        rows: maximum per step.
        answers: maximum of rows that get logits.

    Attributes:
        tokens: int32, 4 + parts arrays [rows]: input_ids, users, two rows of positions, and
            rotary_positions, as in `RaggedBatch`.
        control: int32 [6 + answers]: used [1], number of rows that enter the first layer; plan [4],
            as in `LayerwisePrefill`; answered [answers], the rows that get logits; and their
            number.
        next_tokens, finite, logits: results of `Backend.next_token` for the rows that get logits.

    These are memory views, because after a step, NumPy's code is no longer in the CPU's caches.
    """

    def __init__(self, model: MultiUserModel, saved: Parameter, rows: int, answers: int) -> None:
        super().__init__(auto_prefix=False)
        program = Program()
        with cells_as_functions():
            results = record_step(program, model, saved, rows, answers)
        inputs = np.zeros(program.input_words, np.int32)
        head = (4 + model.rotary.parts) * rows
        view = inputs.data
        self.tokens = [view[first : first + rows] for first in range(0, head, rows)]
        self.control = view[head:]
        arrays = [np.zeros(result.shape, result.dtype) for result in results]
        next_tokens, finite, self.logits = arrays
        self.next_tokens, self.finite = next_tokens.data, finite.data
        self.code = Tensor(program.code(results))
        self.tensors = (
            parameter_of(inputs, "step_inputs"),
            *program.parameters,
            *(parameter_of(one, f"result_{index}") for index, one in enumerate(arrays)),
        )
        name = f"{library.path()}:run_program"
        self.run = ops.Custom(name, lambda *of: [1], lambda *of: ms.int32, "aot")
        self.captured: Optional[CapturedProgram] = None

    def construct(self) -> Tensor:
        """-> [1], unused: an operator must return something."""
        nothing: Tensor = self.run(self.code, *self.tensors)
        return nothing

    def step(self) -> None:
        """Computes results from `tokens` and `control`; the first call compiles the graph."""
        if self.captured is None:
            self()
            self.captured = CapturedProgram()
        else:
            self.captured.replay()


def record_step(
    program: Program, model: MultiUserModel, saved: Parameter, rows: int, answers: int
) -> Sequence[Value]:
    """Records the program of `NativeForward`; returns its results."""
    # ChatGLM-6B counts positions in the answer from 1.
    cosine, sine = model.rotary.tables(model.layout.seq_length + 1)
    input_ids, users = program.step_inputs(rows), program.step_inputs(rows)
    positions = program.step_inputs(2, rows)
    rotary_positions = program.step_inputs(model.rotary.parts, rows)
    used, plan = program.step_inputs(1), program.step_inputs(4)
    answered, answered_used = program.step_inputs(answers), program.step_inputs(1)
    batch: RaggedBatch = {
        "users": users,
        "positions": positions,
        "used": used,
        "rotary_positions": rotary_positions,
        "cosine": cosine.astype(np.float32),
        "sine": sine.astype(np.float32),
        "partner": model.rotary.partner.astype(np.int32),
        "layerwise": {"plan": plan, "saved": saved},
    }
    hidden = model.hidden_states(input_ids, batch)
    hidden = take_rows(hidden, answered, answered_used)
    batch["used"] = answered_used
    logits = model.logits(hidden, batch)
    results: Sequence[Value] = model.next_token(hidden, logits, batch)
    return results
