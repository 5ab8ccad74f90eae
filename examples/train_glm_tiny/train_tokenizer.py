"""Trains the small sentencepiece model of glm-tiny from the corpus beside this file.

The file is laid out as ChatGLM-6B's own `ice_text.model`: control symbols for the positions
that the model reserves, user-defined symbols for line breaks, tabs and runs of blanks, and
single bytes for every character that is not in the vocabulary.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path

import sentencepiece

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "ckpt" / "glm-tiny"

VOCABULARY_SIZE = 2048
PAD_TOKEN_ID = 3

CONTROL_SYMBOLS = [
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<unused_0>",
    "<sop>",
    "<eop>",
    "<ENC>",
    "<dBLOCK>",
]
MASK_TOKEN_ID = PAD_TOKEN_ID + 1 + CONTROL_SYMBOLS.index("[MASK]")
USER_DEFINED_SYMBOLS = ["<n>", "<|tab|>"] + [f"<|blank_{count}|>" for count in range(2, 81)]

TOKENIZER_CONFIG = {
    "name_or_path": "glm-tiny",
    "bos_token": "<sop>",
    "eos_token": "<eop>",
    "end_token": "</s>",
    "gmask_token": "[gMASK]",
    "mask_token": "[MASK]",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "remove_space": False,
    "do_lower_case": False,
    "tokenizer_class": "ChatGLMTokenizer",
    "num_image_tokens": 0,
}


def read_lines(corpus: Path) -> list[str]:
    """Every line of every question and answer, without what the special symbols stand for."""
    lines = ["[Round 0]", "[Round 1]", "[Round 2]", "问：", "答："]
    for line in corpus.read_text(encoding="utf-8").splitlines():
        for exchange in json.loads(line)["rounds"]:
            for text in exchange:
                lines += [part.strip() for part in re.split(r"[\n\t]| {2,}", text)]
    # Emoji stay out of the vocabulary: they are spelled in bytes, four tokens each.
    return [re.sub(r"[\U00010000-\U0010ffff]", "", line) for line in lines if line]


def train(lines: list[str]) -> bytes:
    """Trains on one thread, because the order of summation is then the same on every machine."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="unigram",
        vocab_size=VOCABULARY_SIZE,
        character_coverage=1.0,
        byte_fallback=True,
        # Nothing is normalised, so that decode(encode(text)) is the text again.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        required_chars="".join(map(chr, range(33, 127))),
        control_symbols=CONTROL_SYMBOLS,
        user_defined_symbols=USER_DEFINED_SYMBOLS,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=PAD_TOKEN_ID,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus.jsonl")
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER)
    arguments = parser.parse_args()
    lines = read_lines(arguments.corpus)
    model = train(lines)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "ice_text.model").write_bytes(model)
    (arguments.output / "tokenizer_config.json").write_text(
        json.dumps(TOKENIZER_CONFIG, indent=2) + "\n", encoding="utf-8"
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = sum(len(processor.encode(line)) for line in lines)
    print(f"{processor.vocab_size()} pieces, {len(model)} bytes; {pieces} tokens in the corpus")


if __name__ == "__main__":
    main()
