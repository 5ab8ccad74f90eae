"""Converts the corpus into padded batches of inputs and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from corpus import Exchange, groups_of_similar_size, loosely_asked
from train_tokenizer import PAD_TOKEN_ID

from glm_multiuser.backends.portable.attention import MASKED
from glm_multiuser.tokenizers import ChatGLM6BTokenizer

LENGTHS = (48, 64, 96, 128, 192, 256, 384, 512)
"""Samples are padded to one of these lengths: each is one compiled graph."""


@dataclass(frozen=True)
class Sample:
    """A prompt ending in `[gMASK] <sop>`, and an answer ending in `<eop>`."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Batch:
    """Arrays of one padded batch, in the model's input format.

    Attributes:
        input_ids: int32 [samples, length].
        position_ids: int32 [2, samples * length].
        mask: float32 [samples, 1, length, length], 0 or `MASKED`.
        targets: int32 [samples * length], the next token.
        weights: float32 [samples * length], 1 in the answer, else 0.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    mask: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def make_sample(
    tokenizer: ChatGLM6BTokenizer, history: Sequence[Exchange], question: str, answer: str
) -> Sample:
    prompt = tokenizer.encode_prompt(question, list(history))
    return Sample(prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id])


def plain_samples(tokenizer: ChatGLM6BTokenizer, dialogues: list[list[Exchange]]) -> list[Sample]:
    """Every round of every dialogue, with the rounds before it as history."""
    return [
        make_sample(tokenizer, dialogue[:number], question, answer)
        for dialogue in dialogues
        for number, (question, answer) in enumerate(dialogue)
    ]


def varied_samples(
    tokenizer: ChatGLM6BTokenizer,
    dialogues: list[list[Exchange]],
    share: float,
    random: np.random.Generator,
) -> list[Sample]:
    """`plain_samples`, with a share typed carelessly or preceded by unrelated rounds.

    Without unrelated rounds the model would only learn questions that open a conversation.
    """
    single = [dialogue[0] for dialogue in dialogues if len(dialogue) == 1]
    samples = []
    for dialogue in dialogues:
        for number, (question, answer) in enumerate(dialogue):
            history = dialogue[:number]
            if number == 0 and random.random() < share:
                question = loosely_asked(question, random)
            if len(dialogue) == 1 and random.random() < share:
                others = random.choice(len(single), size=random.integers(1, 3), replace=False)
                history = [single[other] for other in others]
            samples.append(make_sample(tokenizer, history, question, answer))
    return samples


def padded_batches(
    samples: Sequence[Sample], tokens: int, random: np.random.Generator
) -> list[Batch]:
    """Batches of about `tokens` tokens, grouped by length, in random order."""
    sizes = [len(sample.prompt) + len(sample.answer) - 1 for sample in samples]
    return [
        make_batch(length, count, [samples[number] for number in numbers])
        for length, count, numbers in groups_of_similar_size(sizes, LENGTHS, tokens, random)
    ]


def make_batch(length: int, count: int, samples: Sequence[Sample]) -> Batch:
    """Pads `samples` to `count` rows of `length`; rows without a sample have no weight."""
    input_ids = np.full((count, length), PAD_TOKEN_ID, np.int32)
    position_ids = np.zeros((2, count, length), np.int32)
    visible = np.tile(np.tri(length, dtype=bool), (count, 1, 1, 1))
    targets = np.zeros((count, length), np.int32)
    weights = np.zeros((count, length), np.float32)
    for row, sample in enumerate(samples):
        ids = sample.prompt + sample.answer
        first, last = len(sample.prompt) - 1, len(ids) - 1
        # The context is everything before <sop>: it has bidirectional attention and its own
        # positions; what follows stays at the position of [gMASK] and has block positions.
        input_ids[row, :last] = ids[:-1]
        position_ids[0, row] = np.minimum(np.arange(length), first - 1)
        position_ids[1, row, first:] = np.arange(1, length - first + 1)
        visible[row, :, :, :first] = True
        targets[row, first:last] = sample.answer
        weights[row, first:last] = 1.0
    return Batch(
        input_ids,
        position_ids.reshape(2, -1),
        np.where(visible, 0.0, MASKED).astype(np.float32),
        targets.reshape(-1),
        weights.reshape(-1),
    )
