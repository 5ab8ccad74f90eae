"""The tokenizer of ChatGLM-6B: a sentencepiece file and the prompt form of its chat.

Follows `tokenization_chatglm.py` and `modeling_chatglm.py` of THUDM/chatglm-6b, with one
deliberate difference: the original reads `<sop>`, `<eop>`, `[MASK]`, `<pad>` and `<unk>` in a
user's text as the special tokens of that name, so a user can end or restart the context. Here
they are ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.tokenizers.answers import AnswerReader, PlainAnswerReader
from glm_multiuser.tokenizers.folder import read_tokenizer_config, refuse_settings
from glm_multiuser.tokenizers.history import messages_of
from glm_multiuser.tokenizers.messages import questions_and_answers, refuse_tools
from glm_multiuser.tokenizers.sentencepiece_file import SentencePieceFile
from glm_multiuser.tokenizers.streaming import BYTE_BY_BYTE, IncrementalDetokenizer
from glm_multiuser.tokenizers.text import check_text

FAMILY = "ChatGLM-6B"

VOCABULARY_FILE = "ice_text.model"

SPECIAL_PIECES = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<unused_0>",
    "<sop>",
    "<eop>",
    "<ENC>",
    "<dBLOCK>",
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
)

LONGEST_BLANK = 80
"""Spaces that one `<|blank_k|>` symbol can stand for, as in the original."""

CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""What `clean_up_tokenization_spaces` of transformers does to decoded text, in its order."""

UNSUPPORTED_SETTINGS = {"remove_space": False, "do_lower_case": False, "num_image_tokens": 0}
"""Settings that would change every id, with the only value that the released files use."""

PUNCTUATION = {",": "，", "!": "！", ":": "：", ";": "；", "?": "？"}


class ChatGLMTokenizer:
    """Text to ids and back for ChatGLM-6B.

    Special tokens are found by the name of their piece, so files with another numbering work.
    The object is never changed after its construction: any number of threads may use it.

    Args:
        file: a sentencepiece model file, named `ice_text.model` in the released checkpoints.
        clean_up_spaces: whether decoded text loses the space before punctuation, as in the
            original chat.

    Attributes:
        vocab_size: pieces of the file; a model's vocabulary may be padded to a larger number.
        gmask_token_id, bos_token_id, eos_token_id: ids of `[gMASK]`, `<sop>` and `<eop>`.
        stop_token_ids: `<eop>` alone.
        special_ids: ids that stand for no text and that no text becomes.

    Raises:
        CheckpointError: a file that is missing or broken, that lacks a piece which the family
            needs, or in which a user could write a special token as text.
    """

    def __init__(self, file: Union[str, Path], *, clean_up_spaces: bool = True) -> None:
        self._pieces = SentencePieceFile(file)
        for piece in SPECIAL_PIECES:
            self._pieces.refuse_as_text(piece)
        self.vocab_size = self._pieces.size
        self.special_ids = self._pieces.special_ids
        self.gmask_token_id = self._pieces.need("[gMASK]", FAMILY)
        self.bos_token_id = self._pieces.need("<sop>", FAMILY)
        self.eos_token_id = self._pieces.need("<eop>", FAMILY)
        self.stop_token_ids: tuple[int, ...] = (self.eos_token_id,)
        self._whitespace = self._whitespace_symbols()
        self._replacements = CLEAN_UP if clean_up_spaces else ()

    @classmethod
    def from_folder(cls, folder: Union[str, Path]) -> ChatGLMTokenizer:
        """Loads `ice_text.model` with the settings of `tokenizer_config.json`, if there is one.

        Raises:
            CheckpointError: as the class does, or a setting that this version cannot follow.
        """
        config = read_tokenizer_config(Path(folder))
        refuse_settings(Path(folder), config, UNSUPPORTED_SETTINGS)
        return cls(
            Path(folder) / VOCABULARY_FILE,
            clean_up_spaces=bool(config.get("clean_up_tokenization_spaces", True)),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, without anything added.

        No text becomes a special token: `<sop>`, `[gMASK]`, `</s>` and so on are spelled with
        ordinary pieces. The names of whitespace symbols (`<n>`, `<|tab|>`, `<|blank_2|>` to
        `<|blank_80|>`) become the line break, tab or spaces that they name, exactly as in the
        original: they can do no more than the whitespace that a user may type anyway.

        Raises:
            InvalidParameterError: not a string, or half of a surrogate pair in it.
        """
        check_text(text, "text")
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        text = re.sub(f" {{2,{LONGEST_BLANK}}}", lambda run: f"<|blank_{len(run.group())}|>", text)
        return self._pieces.encode(text)

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        """Ids of the prompt that the original `chat` feeds, ending with `[gMASK] <sop>`.

        Without history the prompt is the query itself, else the rounds are numbered from 0.
        This family has no system role: a system message is written before the first question,
        with a line break between them.

        Args:
            query: the question to be answered.
            history: what `rounds_of` reads.

        Raises:
            InvalidParameterError: a query that is not a string, or a history that is none.
        """
        return self.encode_messages(messages_of(query, history))

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of a conversation, in the form of `encode_prompt`.

        Args:
            messages: `{"role", "content"}` of roles system (only first), user and assistant;
                the last one is the question.
            tools: must be empty.

        Raises:
            InvalidParameterError: another order or role, or tools.
        """
        refuse_tools(tools, FAMILY)
        questions, answers = questions_and_answers(messages)
        prompt = questions[-1]
        if answers:
            told = [
                f"[Round {number}]\n问：{question}\n答：{answer}\n"
                for number, (question, answer) in enumerate(zip(questions, answers))
            ]
            prompt = f"{''.join(told)}[Round {len(answers)}]\n问：{prompt}\n答："
        return [*self.encode(prompt), self.gmask_token_id, self.bos_token_id]

    def answer_reader(self, tools: Sequence[Mapping[str, Any]] = ()) -> AnswerReader:
        """A reader for one answer, all of which is content.

        Raises:
            InvalidParameterError: tools, which this family does not know.
        """
        refuse_tools(tools, FAMILY)
        return PlainAnswerReader()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, as the original `chat` decodes it.

        Special tokens, and ids beyond the vocabulary file (a model's vocabulary is padded),
        stand for no text. A line break, tab or run of spaces comes from its own id only: when
        a model spells `<n>` with ordinary pieces, it stays `<n>`.
        """
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What one id says by itself: its bytes inside an answer, or a special token's name.

        An id beyond the vocabulary file says nothing.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        if token_id in self.special_ids:
            return self._pieces.name(token_id)
        return self._bytes_of(token_id, at_start=False)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A detokenizer for one answer; its deltas join to what `decode` returns."""
        at_start = self._pieces.drops_a_leading_space

        def token_bytes(token_id: int) -> bytes:
            nonlocal at_start
            token_id = int(token_id)
            if not 0 <= token_id < self.vocab_size or token_id in self.special_ids:
                return b""
            written = self._bytes_of(token_id, at_start)
            at_start = at_start and self._pieces.drops_every_leading_space and not written
            return written

        return IncrementalDetokenizer(
            token_bytes, errors=BYTE_BY_BYTE, replacements=self._replacements
        )

    @staticmethod
    def process_response(text: str) -> str:
        """What the original does to a complete answer before it shows it.

        Outer whitespace goes, a placeholder of the training data is filled in, and ASCII
        punctuation beside a Chinese character becomes full-width.
        """
        text = text.strip().replace("[[训练时间]]", "2023年")
        for narrow, wide in PUNCTUATION.items():
            mark = re.escape(narrow)
            text = re.sub(f"([\u4e00-\u9fff]){mark}", rf"\g<1>{wide}", text)
            text = re.sub(f"{mark}([\u4e00-\u9fff])", rf"{wide}\g<1>", text)
        return text

    def _bytes_of(self, token_id: int, at_start: bool) -> bytes:
        if token_id in self._whitespace:
            return self._whitespace[token_id]
        return self._pieces.bytes_of(token_id, at_start)

    def _whitespace_symbols(self) -> dict[int, bytes]:
        need = self._pieces.need
        symbols = {need("<n>", FAMILY): b"\n", need("<|tab|>", FAMILY): b"\t"}
        for length in range(2, LONGEST_BLANK + 1):
            symbols[need(f"<|blank_{length}|>", FAMILY)] = b" " * length
        return symbols
