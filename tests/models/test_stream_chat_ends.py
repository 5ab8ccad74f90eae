"""How streams of the low-level chat end; the model answers by tokens that are written down."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
import pytest
from mindspore import Tensor

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.errors import GenerationError, InvalidParameterError, PromptTooLongError
from glm_multiuser.mindformers.glm_for_multi_user import StreamChat
from glm_multiuser.model_config import ModelConfig
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from tests.golden_data import golden_folder


class Recorder:
    """A streamer as MindFormers' callers pass it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ends = 0

    def put(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def end(self) -> None:
        self.ends += 1


class Scripted(StreamChat):
    """Answers every prompt by the same tokens, and remembers what it was called with."""

    config = ModelConfig(
        vocab_size=30,
        hidden_size=8,
        num_layers=1,
        num_attention_heads=2,
        inner_hidden_size=8,
        mask_token_id=20,
        gmask_token_id=21,
        bos_token_id=24,
        eos_token_id=25,
    )
    layout = CellLayout.plan(2, 16)

    def __init__(self, answer: Sequence[int], lock: Optional[threading.Lock] = None) -> None:
        self.answer = list(answer)
        self.lock = lock
        self.position_ids: list[list[list[int]]] = []
        self.locked: list[bool] = []

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, *rest: object
    ) -> tuple[None, None, Tensor]:
        self.position_ids.append(position_ids.asnumpy().tolist())
        if self.lock:
            self.locked.append(self.lock.locked())
        logits = np.full((1, self.config.vocab_size), 0 if self.answer else np.nan, np.float32)
        if self.answer:
            logits[0, self.answer.pop(0)] = 1
        return None, None, Tensor(logits)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    found = load_tokenizer(golden_folder("e2e_chatglm_6b", "ice_text.model"))
    assert found is not None
    return found


def pieces_of(
    model: Scripted,
    tokenizer: ChatTokenizer,
    prompt: Sequence[object],
    max_length: int = 16,
    streamer: Optional[Recorder] = None,
) -> Iterator[str]:
    return model._stream_chat(
        [prompt],
        top_k=1,
        top_p=1.0,
        repetition_penalty=1.0,
        max_length=max_length,
        eos_token_id=25,
        streamer=streamer,
        tokenizer=tokenizer,
        tlock=model.lock,
        qi=1,
    )


def test_the_lock_is_held_for_graph_calls_and_nothing_else(tokenizer: ChatTokenizer) -> None:
    model = Scripted([12, 13, 14, 25], threading.Lock())
    pieces = 0
    for _ in pieces_of(model, tokenizer, [5, 6, 21, 24]):
        pieces += 1
        assert model.lock is not None
        assert not model.lock.locked()
    assert model.locked == [True] * 4
    assert pieces == 4


@pytest.mark.parametrize(("max_length", "new"), [(10, 6), (16, 12), (17, 12), (2048, 12)])
def test_the_answer_ends_at_the_longest_length(
    tokenizer: ChatTokenizer, max_length: int, new: int
) -> None:
    model, recorder = Scripted([12] * 20), Recorder()  # whose caches hold 16 tokens
    pieces = list(pieces_of(model, tokenizer, [5, 6, 21, 24], max_length, recorder))
    assert len(pieces) == new + 1
    assert (recorder.token_ids, recorder.ends) == ([12] * new, 1)
    assert len(model.answer) == 20 - new


@pytest.mark.parametrize(
    ("length", "max_length", "error", "message"),
    [
        (0, 16, InvalidParameterError, "origin_inputs has 0 tokens"),
        (8, 8, PromptTooLongError, r"8 tokens; with max_length 8 .* at most 7"),
        (16, 32, PromptTooLongError, r"16 tokens; .* caches that hold 16 .* at most 15"),
    ],
)
def test_a_prompt_that_leaves_no_room_or_is_empty(
    tokenizer: ChatTokenizer, length: int, max_length: int, error: type[Exception], message: str
) -> None:
    recorder = Recorder()
    pieces = pieces_of(Scripted([12]), tokenizer, [5] * length, max_length, recorder)
    with pytest.raises(error, match=message):
        next(pieces)
    assert (recorder.token_ids, recorder.ends) == ([], 1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [[5, 6], [5, 6]],
            r"origin_inputs has shape \(1, 2, 2\); it must be \[length\] or \[1, length\]",
        ),
        ([[5, 6], [7]], r"origin_inputs is \[\[\[5, 6\], \[7\]\]\]; it must be \[length\]"),
        ([5.7, 6.2], r"prompt\[0\] is 5\.7; token ids are whole numbers"),
    ],
)
def test_several_prompts_and_fractions_are_refused(
    tokenizer: ChatTokenizer, prompt: list[object], message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        next(pieces_of(Scripted([12]), tokenizer, prompt))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_length", None),
        ("max_length", 8.5),
        ("eos_token_id", None),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [25, "</s>"]),
    ],
)
def test_a_length_and_end_tokens_are_whole_numbers(
    tokenizer: ChatTokenizer, setting: str, value: object
) -> None:
    settings: dict[str, Any] = {"max_length": 16, "eos_token_id": 25, setting: value}
    pieces = Scripted([12])._stream_chat([5], 1, 1.0, 1.0, tokenizer=tokenizer, **settings)
    with pytest.raises(InvalidParameterError, match=rf"{setting} is {re.escape(repr(value))}; "):
        next(pieces)


def test_the_streamer_hears_of_the_end_if_the_stream_is_closed(tokenizer: ChatTokenizer) -> None:
    recorder = Recorder()
    pieces = pieces_of(Scripted([12, 13]), tokenizer, [5, 6, 21, 24], streamer=recorder)
    next(pieces)
    assert recorder.ends == 0
    pieces.close()  # type: ignore[attr-defined]
    assert (recorder.token_ids, recorder.ends) == ([12], 1)


def test_logits_that_are_not_finite(tokenizer: ChatTokenizer) -> None:
    recorder = Recorder()
    pieces = pieces_of(Scripted([12]), tokenizer, [5, 6, 21, 24], streamer=recorder)
    next(pieces)
    with pytest.raises(GenerationError, match="user 1"):
        next(pieces)
    assert recorder.ends == 1


@pytest.mark.parametrize(
    ("prompt", "answer", "first"),
    [([5, 20, 6, 24], [21, 7, 8], 1), ([5, 6, 7], [8, 24, 7], 2), ([5, 6, 7], [20, 7, 8], 2)],
    ids=["[gMASK]", "<sop>", "[MASK]"],
)
def test_an_answer_moves_no_positions(
    tokenizer: ChatTokenizer, prompt: list[int], answer: list[int], first: int
) -> None:
    # As in `MultiUserLLM` and the original's chat(): the prompt decides.
    model = Scripted([*answer, 25])
    list(pieces_of(model, tokenizer, prompt))
    context_length = prompt.index(24) if 24 in prompt else len(prompt)
    start = len(prompt) - context_length + 1
    assert model.position_ids[1:] == [[[first], [start + step]] for step in range(3)]
