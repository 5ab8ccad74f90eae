"""Trains the small sentencepiece model of chatglm3-tiny from the corpora.

The layout is that of ChatGLM3's own `tokenizer.model`: no special tokens beside <unk>, <s> and
</s>, with ids 0, 1 and 2, and byte fallback for characters outside the vocabulary. The other
special tokens get the ids after its pieces.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import sentencepiece
from shared import CORPUS, DEFAULT_FOLDER, corpus_lines, train_pieces
from tool_calls import (
    CHINESE_CITIES,
    CHINESE_SKIES,
    ENGLISH_CITIES,
    ENGLISH_SKIES,
    TOOLS,
    read_tool_dialogues,
)

from glm_multiuser.tokenizers.calls import read_json_arguments, write_python_call
from glm_multiuser.tokenizers.chatglm2 import TOOLS_INSTRUCTION

VOCABULARY_SIZE = 2039
"""2048 with the nine special tokens after them."""

TOOLS_WEIGHT = 10
"""Weight of the tool texts: they are in many prompts, so they should be few tokens."""

TOKENIZER_CONFIG = {
    "name_or_path": "chatglm3-tiny",
    "remove_space": False,
    "do_lower_case": False,
    "tokenizer_class": "ChatGLMTokenizer",
}


def tool_lines() -> list[str]:
    """The tool texts as in prompts, without placeholders."""
    functions = [tool["function"] for tool in TOOLS]
    texts = [TOOLS_INSTRUCTION, json.dumps(functions, indent=4, ensure_ascii=False)]
    for dialogue in read_tool_dialogues():
        for message in dialogue.messages:
            texts.append(message["content"] or "")
            for call in message.get("tool_calls", ()):
                function = call["function"]
                arguments = read_json_arguments(re.sub(r": <\w+>", ": 0", function["arguments"]))
                texts += [function["name"], write_python_call(arguments or {})]
    texts = [re.sub(r"<\w+>", "", text) for text in texts]
    return [line for text in texts for line in text.split("\n")] * TOOLS_WEIGHT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER)
    arguments = parser.parse_args()
    lines = [*corpus_lines(arguments.corpus), *tool_lines()]
    # One piece each: identical in a question, in quotes and in an answer, so it can be copied.
    whole = [*ENGLISH_CITIES, *CHINESE_CITIES, *ENGLISH_SKIES, *CHINESE_SKIES]
    lines += [*whole, *sorted(set("".join(CHINESE_CITIES)))]
    model = train_pieces(
        lines,
        VOCABULARY_SIZE,
        pad_id=-1,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=whole,
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "tokenizer.model").write_bytes(model)
    (arguments.output / "tokenizer_config.json").write_text(
        json.dumps(TOKENIZER_CONFIG, indent=2) + "\n", encoding="utf-8"
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = sum(len(processor.encode(line)) for line in corpus_lines(arguments.corpus))
    print(f"{processor.vocab_size()} pieces, {len(model)} bytes; {pieces} tokens in the corpus")


if __name__ == "__main__":
    main()
