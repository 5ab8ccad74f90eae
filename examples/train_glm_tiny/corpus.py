"""The corpus in this folder: dialogues, vocabularies trained on it, groups of samples."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

CORPUS = Path(__file__).resolve().parent / "corpus.jsonl"

Exchange = tuple[str, str]


def read_dialogues(corpus: Path) -> list[list[Exchange]]:
    lines = corpus.read_text(encoding="utf-8").splitlines()
    return [
        [(question, answer) for question, answer in json.loads(line)["rounds"]] for line in lines
    ]


def loosely_asked(question: str, random: np.random.Generator) -> str:
    """The same question, typed in a hurry."""
    if random.random() < 0.7:
        question = question.rstrip("?？。")
    if random.random() < 0.5 and question.isascii():
        question = question[0].lower() + question[1:]
    return question


def corpus_lines(corpus: Path) -> list[str]:
    """Every line of every question and answer, without runs of blanks."""
    lines = []
    for dialogue in read_dialogues(corpus):
        for exchange in dialogue:
            for text in exchange:
                lines += [part.strip() for part in re.split(r"[\n\t]| {2,}", text)]
    return lines


def train_pieces(lines: list[str], vocabulary_size: int, **settings: Any) -> bytes:
    """Trains a sentencepiece model on one thread, so it is reproducible on every machine.

    Args:
        lines: training text.
        vocabulary_size: pieces, bytes and symbols together.
        settings: further sentencepiece options.
    """
    model = io.BytesIO()
    # Emoji stay out of the vocabulary: they take four byte tokens each.
    told = [re.sub(r"[\U00010000-\U0010ffff]", "", line) for line in lines if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(told),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocabulary_size,
        character_coverage=1.0,
        byte_fallback=True,
        # No normalisation, so decode(encode(text)) == text.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        required_chars="".join(map(chr, range(33, 127))),
        unk_id=0,
        bos_id=1,
        eos_id=2,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


def groups_of_similar_size(
    sizes: Sequence[int], lengths: Sequence[int], tokens: int, random: np.random.Generator
) -> list[tuple[int, int, list[int]]]:
    """Groups samples into batches of about `tokens` tokens, in random order.

    Args:
        sizes: tokens of each sample.
        lengths: padded lengths, in ascending order.
        tokens: of a batch, padding included.
        random: for the order.

    Returns:
        For each batch: the length, its capacity in samples, and the indices of its samples.
    """
    by_length: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        length = next(length for length in lengths if length >= size)
        by_length.setdefault(length, []).append(number)
    groups = []
    for length, same in sorted(by_length.items()):
        count = max(1, tokens // length)
        order = random.permutation(len(same))
        for first in range(0, len(same), count):
            groups.append((length, count, [same[i] for i in order[first : first + count]]))
    return [groups[number] for number in random.permutation(len(groups))]
