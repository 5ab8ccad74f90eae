"""The tokenizer of ChatGLM-6B: a sentencepiece file and the prompt form of its chat.

Follows `tokenization_chatglm.py` and `modeling_chatglm.py` of THUDM/chatglm-6b, with one
deliberate difference: the original reads `<sop>`, `<eop>`, `[MASK]`, `<pad>` and `<unk>` in a
user's text as the special tokens of that name, so a user can end or restart the context. Here
they are ordinary text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Union

from glm_multiuser.tokenizers.answers import AnswerReader
from glm_multiuser.tokenizers.base import ChatTokenizer
from glm_multiuser.tokenizers.folder import read_tokenizer_config
from glm_multiuser.tokenizers.headers import TRAINING_TIME
from glm_multiuser.tokenizers.messages import questions_and_answers, refuse_tools
from glm_multiuser.tokenizers.sentencepiece_file import SentencePieceFile
from glm_multiuser.tokenizers.text import Objects

FAMILY = "ChatGLM-6B"

VOCABULARY_FILE = "ice_text.model"

SPECIAL_PIECES = (
    *("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"),
    *("<unk>", "<s>", "</s>", "<pad>"),
)

LONGEST_BLANK = 80
"""Most spaces in one `<|blank_k|>` symbol, as in the original."""

CLEAN_UP = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What `clean_up_tokenization_spaces` of transformers does to decoded text, in its order."""

UNSUPPORTED_SETTINGS = {"remove_space": False, "do_lower_case": False, "num_image_tokens": 0}
"""Settings that would change ids, with the only value that the released files use."""

PUNCTUATION = {",": "，", "!": "！", ":": "：", ";": "；", "?": "？"}


class ChatGLM6BTokenizer(ChatTokenizer):
    """Text to ids and back for ChatGLM-6B.

    Special tokens are found by the name of their piece, so files with another numbering work.
    `encode` spells `<sop>`, `[gMASK]`, `</s>` and so on with ordinary pieces. The names of
    whitespace symbols (`<n>`, `<|tab|>`, `<|blank_2|>` to `<|blank_80|>`) become the line break,
    tab or spaces that they name, exactly as in the original: they can do no more than the
    whitespace that a user may type anyway. `decode` makes whitespace of their ids only: when a
    model spells `<n>` with ordinary pieces, it stays `<n>`.

    Args:
        file: a sentencepiece model file, named `ice_text.model` in the released checkpoints.
        clean_up_spaces: whether decoded text loses the space before punctuation, as in the
            original chat.

    Attributes:
        gmask_token_id, bos_token_id, eos_token_id: ids of `[gMASK]`, `<sop>` and `<eop>`.
        stop_token_ids: `<eop>` alone.

    Raises:
        CheckpointError: a missing or broken file, a missing piece that the family needs, or a
            special token that users could write as text.
    """

    def __init__(self, file: Union[str, Path], *, clean_up_spaces: bool = True) -> None:
        pieces = SentencePieceFile(file)
        for piece in SPECIAL_PIECES:
            pieces.refuse_as_text(piece)
        self.gmask_token_id = pieces.need("[gMASK]", FAMILY)
        self.bos_token_id = pieces.need("<sop>", FAMILY)
        self.eos_token_id = pieces.need("<eop>", FAMILY)
        self.stop_token_ids = (self.eos_token_id,)
        vocabulary = pieces.vocabulary()
        super().__init__(
            replace(
                vocabulary,
                encode=lambda text: pieces.encode(_with_whitespace_symbols(text)),
                pieces={**vocabulary.pieces, **_whitespace_pieces(pieces)},
            ),
            replacements=CLEAN_UP if clean_up_spaces else (),
        )

    @classmethod
    def from_folder(cls, folder: Union[str, Path]) -> ChatGLM6BTokenizer:
        """Loads `ice_text.model` with the settings of `tokenizer_config.json`, if there is one.

        Raises:
            CheckpointError: as the class, or an unsupported setting.
        """
        config = read_tokenizer_config(Path(folder), UNSUPPORTED_SETTINGS)
        clean_up = bool(config.get("clean_up_tokenization_spaces", True))
        return cls(Path(folder) / VOCABULARY_FILE, clean_up_spaces=clean_up)

    def encode_messages(
        self, messages: Objects, tools: Objects = (), *, continue_final_message: bool = False
    ) -> list[int]:
        """Encodes the prompt of the original `chat`, ending with `[gMASK] <sop>`.

        A single question is the whole prompt; otherwise rounds are numbered from 0. This family
        has no system role: see `questions_and_answers`. Every answer begins at `<sop>`, so the
        start of a continued one goes before `[gMASK]`.
        """
        refuse_tools(tools, FAMILY)
        questions, answers = questions_and_answers(messages, continue_final_message)
        begun = answers.pop() if continue_final_message else ""
        prompt = questions[-1]
        if answers or continue_final_message:
            rounds = [
                f"[Round {number}]\n问：{question}\n答：{answer}\n"
                for number, (question, answer) in enumerate(zip(questions, answers))
            ]
            prompt = f"{''.join(rounds)}[Round {len(answers)}]\n问：{prompt}\n答：{begun}"
        return [*self.encode(prompt), self.gmask_token_id, self.bos_token_id]

    def answer_reader(self, tools: Objects = (), *, continued: bool = False) -> AnswerReader:
        refuse_tools(tools, FAMILY)
        return AnswerReader()

    def process_response(self, text: str) -> str:
        """Post-processes a complete answer as the original does.

        Strips outer whitespace, fills in a placeholder of the training data, and makes ASCII
        punctuation next to a Chinese character full-width.
        """
        text = text.strip().replace(*TRAINING_TIME)
        for narrow, wide in PUNCTUATION.items():
            mark = re.escape(narrow)
            text = re.sub(f"([\u4e00-\u9fff]){mark}", rf"\g<1>{wide}", text)
            text = re.sub(f"{mark}([\u4e00-\u9fff])", rf"{wide}\g<1>", text)
        return text


def _with_whitespace_symbols(text: str) -> str:
    text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
    return re.sub(f" {{2,{LONGEST_BLANK}}}", lambda run: f"<|blank_{len(run.group())}|>", text)


def _whitespace_pieces(pieces: SentencePieceFile) -> dict[int, bytes]:
    symbols = {"<n>": b"\n", "<|tab|>": b"\t"}
    symbols.update({f"<|blank_{length}|>": b" " * length for length in range(2, LONGEST_BLANK + 1)})
    return {pieces.need(symbol, FAMILY): space for symbol, space in symbols.items()}
