"""Converts the corpora into padded batches of inputs and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from shared import Exchange, groups_of_similar_size, loosely_asked
from tool_calls import Message, ToolDialogue, other_values, some_tools, tools_named

from glm_multiuser.tokenizers import ChatGLM2Tokenizer

LENGTHS = (64, 128, 256, 512, 768)
"""Samples are padded to one of these lengths: each is one compiled graph."""

LENGTHS_OF_CHATS = (64, 128, 256, 256)
"""Maximum lengths of chats of unrelated dialogues, drawn uniformly from this tuple."""

CHATS_WITH_TOOLS = 11
"""Chats with tools per epoch."""

DIALOGUES_WITH_TOOLS = 4
"""Dialogues per chat, after one list of tools."""

PAD_TOKEN_ID = 0


@dataclass(frozen=True)
class Sample:
    """A whole conversation.

    Attributes:
        ids: tokens of the conversation up to the token that ends the last answer.
        answers: start and end of each answer in `ids`.
    """

    ids: list[int]
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class Batch:
    """Arrays of one padded batch, in the model's input format.

    Attributes:
        input_ids: int32 [samples, length].
        position_ids: int32 [samples * length].
        targets: int32 [samples * length], the next token.
        weights: float32 [samples * length], 1 in answers, else 0.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def as_messages(rounds: Sequence[Exchange]) -> list[Message]:
    return [
        {"role": role, "content": text}
        for question, answer in rounds
        for role, text in (("user", question), ("assistant", answer))
    ]


def make_sample(
    tokenizer: ChatGLM2Tokenizer, messages: Sequence[Message], tools: Sequence[Any] = ()
) -> Sample:
    """A conversation that ends with an answer.

    Answers are tokenized as in a later prompt, so the prefix cache covers all tokens of an answer.
    The token that ends an answer is the one that begins the next message.
    """
    # An open question is added, because a prompt ends with one.
    ids = tokenizer.encode_messages([*messages, {"role": "user", "content": ""}], tools)
    asked, stops = tokenizer.special["<|assistant|>"], set(tokenizer.stop_token_ids)
    starts = [place + 1 for place, token in enumerate(ids[:-1]) if token == asked]
    ends = [
        next(place + 1 for place in range(start, len(ids)) if ids[place] in stops)
        for start in starts
    ]
    return Sample(ids[: ends[-1]], list(zip(starts, ends)))


def plain_samples(
    tokenizer: ChatGLM2Tokenizer, dialogues: Sequence[list[Exchange]]
) -> list[Sample]:
    """Every dialogue of the corpus as its own sample."""
    return [make_sample(tokenizer, as_messages(dialogue)) for dialogue in dialogues]


def plain_tool_samples(
    tokenizer: ChatGLM2Tokenizer, dialogues: Sequence[ToolDialogue]
) -> list[Sample]:
    """Every tool dialogue as its own sample, with its original values."""
    return [
        make_sample(tokenizer, one.filled(one.values), tools_named(one.tools)) for one in dialogues
    ]


def varied_samples(
    tokenizer: ChatGLM2Tokenizer,
    dialogues: Sequence[list[Exchange]],
    share: float,
    random: np.random.Generator,
) -> list[Sample]:
    """Every dialogue once, some appended to others; a share of the questions is typed carelessly.

    Without unrelated dialogues before it, the model would only learn questions that open a
    conversation.
    """
    left = [dialogues[number] for number in random.permutation(len(dialogues))]
    samples: list[Sample] = []
    rounds: list[Exchange] = []
    longest = 0
    for (question, answer), *more in left:
        if random.random() < share:
            question = loosely_asked(question, random)
        longer = [*rounds, (question, answer), *more]
        sample = make_sample(tokenizer, as_messages(longer))
        if rounds and len(sample.ids) <= longest + 1:
            rounds = longer
            samples[-1] = sample
        else:
            rounds = [(question, answer), *more]
            longest = random.choice(LENGTHS_OF_CHATS)
            samples.append(make_sample(tokenizer, as_messages(rounds)))
    return samples


def varied_tool_samples(
    tokenizer: ChatGLM2Tokenizer,
    tool_dialogues: Sequence[ToolDialogue],
    dialogues: Sequence[list[Exchange]],
    random: np.random.Generator,
) -> list[Sample]:
    """Chats with tools: several tool dialogues with other values, and one dialogue of the corpus.

    Teaches the model to copy unknown values, and that not all questions need tools.
    """
    samples = []
    for _ in range(CHATS_WITH_TOOLS):
        offered = some_tools(random)
        fitting = [one for one in tool_dialogues if one.fits(offered)]
        chat = []
        for number in random.integers(len(fitting), size=DIALOGUES_WITH_TOOLS):
            one = fitting[number]
            values = one.values if random.random() < 0.2 else other_values(one, random)
            chat.append(one.filled(values))
        corpus = as_messages(dialogues[random.integers(len(dialogues))])
        chat.insert(random.integers(DIALOGUES_WITH_TOOLS + 1), corpus)
        messages = [message for part in chat for message in part]
        samples.append(make_sample(tokenizer, messages, tools_named(offered)))
    return samples


def padded_batches(
    samples: Sequence[Sample], tokens: int, random: np.random.Generator
) -> list[Batch]:
    """Batches of about `tokens` tokens, grouped by length, in random order."""
    sizes = [min(len(sample.ids) - 1, LENGTHS[-1]) for sample in samples]
    return [
        make_batch(length, count, [samples[number] for number in numbers])
        for length, count, numbers in groups_of_similar_size(sizes, LENGTHS, tokens, random)
    ]


def make_batch(length: int, count: int, samples: Sequence[Sample]) -> Batch:
    """Pads `samples` to `count` rows of `length`; longer samples lose their last answers."""
    input_ids = np.full((count, length), PAD_TOKEN_ID, np.int32)
    targets = np.zeros((count, length), np.int32)
    weights = np.zeros((count, length), np.float32)
    for row, sample in enumerate(samples):
        ids = sample.ids[: length + 1]
        input_ids[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = ids[1:]
        for start, end in sample.answers:
            if end <= len(ids):
                weights[row, start - 1 : end - 1] = 1.0
    position_ids = np.tile(np.arange(length, dtype=np.int32), count)
    return Batch(input_ids, position_ids, targets.reshape(-1), weights.reshape(-1))
