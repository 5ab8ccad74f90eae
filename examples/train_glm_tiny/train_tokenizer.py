"""Trains the small sentencepiece model of glm-tiny from the corpus in this folder.

The layout is that of ChatGLM-6B's own `ice_text.model`: control symbols for the positions that the
model reserves, user-defined symbols for line breaks, tabs and runs of blanks, and byte fallback for
characters outside the vocabulary.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import sentencepiece
from corpus import CORPUS, corpus_lines, train_pieces

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
    """Every line of the corpus, and the words around them in prompts."""
    return ["[Round 0]", "[Round 1]", "[Round 2]", "问：", "答：", *corpus_lines(corpus)]


def train(lines: list[str]) -> bytes:
    return train_pieces(
        lines,
        VOCABULARY_SIZE,
        control_symbols=CONTROL_SYMBOLS,
        user_defined_symbols=USER_DEFINED_SYMBOLS,
        pad_id=PAD_TOKEN_ID,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=CORPUS)
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
