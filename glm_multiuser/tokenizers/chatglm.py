"""The tokenizer of ChatGLM-6B: a sentencepiece file and the prompt form of its chat.

Follows `tokenization_chatglm.py` and `modeling_chatglm.py` of THUDM/chatglm-6b, with one
deliberate difference: the original reads `<sop>`, `<eop>`, `[MASK]`, `<pad>` and `<unk>` in a
user's text as the special tokens of that name, so a user can end or restart the context. Here
they are ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

import sentencepiece

from glm_multiuser.errors import CheckpointError, InvalidParameterError
from glm_multiuser.tokenizers.folder import read_tokenizer_config
from glm_multiuser.tokenizers.history import rounds_of
from glm_multiuser.tokenizers.streaming import BYTE_BY_BYTE, IncrementalDetokenizer

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

SPACE_MARK = "\u2581"
"""How sentencepiece writes a space inside a piece."""

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
        self._pieces = _load_pieces(Path(file))
        self.vocab_size: int = self._pieces.get_piece_size()
        everything = list(range(self.vocab_size))
        kinds = zip(self._pieces.is_control(everything), self._pieces.is_unknown(everything))
        self.special_ids = frozenset(one for one, kind in enumerate(kinds) if any(kind))
        self._refuse_unsafe_file(file)
        self.gmask_token_id = self._need("[gMASK]", file)
        self.bos_token_id = self._need("<sop>", file)
        self.eos_token_id = self._need("<eop>", file)
        self.stop_token_ids: tuple[int, ...] = (self.eos_token_id,)
        self._whitespace = self._whitespace_symbols(file)
        self._replacements = CLEAN_UP if clean_up_spaces else ()
        # A file says by its settings how many leading spaces decoding drops; the settings
        # themselves cannot be read without protobuf, their effect can.
        two_spaces = self._pieces.decode([self._pieces.piece_to_id(SPACE_MARK)] * 2)
        self._drops_a_leading_space = two_spaces != "  "
        self._drops_every_leading_space = two_spaces == ""

    @classmethod
    def from_folder(cls, folder: Union[str, Path]) -> ChatGLMTokenizer:
        """Loads `ice_text.model` with the settings of `tokenizer_config.json`, if there is one.

        Raises:
            CheckpointError: as the class does, or a setting that this version cannot follow.
        """
        config = read_tokenizer_config(Path(folder))
        for name, only in UNSUPPORTED_SETTINGS.items():
            if config.get(name, only) != only:
                raise CheckpointError(
                    f"tokenizer_config.json in {folder} has {name} {config[name]!r}; "
                    f"this version only reads {only!r}"
                )
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
        _check_text(text, "text")
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        text = re.sub(f" {{2,{LONGEST_BLANK}}}", lambda run: f"<|blank_{len(run.group())}|>", text)
        ids: list[int] = self._pieces.encode(text)
        return ids

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
        _check_text(query, "query")
        system, rounds = rounds_of(history)
        questions = [question for question, _ in rounds] + [query]
        if system:
            questions[0] = f"{system}\n{questions[0]}"
        prompt = questions[-1]
        if rounds:
            told = [
                f"[Round {number}]\n问：{question}\n答：{answer}\n"
                for number, (question, (_, answer)) in enumerate(zip(questions, rounds))
            ]
            prompt = f"{''.join(told)}[Round {len(rounds)}]\n问：{prompt}\n答："
        return [*self.encode(prompt), self.gmask_token_id, self.bos_token_id]

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
            name: str = self._pieces.id_to_piece(token_id)
            return name.encode("utf-8")
        return self._bytes_of(token_id, at_start=False)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A detokenizer for one answer; its deltas join to what `decode` returns."""
        at_start = self._drops_a_leading_space

        def token_bytes(token_id: int) -> bytes:
            nonlocal at_start
            token_id = int(token_id)
            if not 0 <= token_id < self.vocab_size or token_id in self.special_ids:
                return b""
            written = self._bytes_of(token_id, at_start)
            at_start = at_start and self._drops_every_leading_space and not written
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
        piece: str = self._pieces.id_to_piece(token_id)
        if self._pieces.is_byte(token_id):
            return bytes.fromhex(piece[len("<0x") : -len(">")])
        if at_start and piece.startswith(SPACE_MARK):
            piece = piece[len(SPACE_MARK) :]
        return piece.replace(SPACE_MARK, " ").encode("utf-8")

    def _find(self, piece: str) -> Optional[int]:
        # sentencepiece answers with the id of <unk> when there is no such piece.
        found: int = self._pieces.piece_to_id(piece)
        return found if self._pieces.id_to_piece(found) == piece else None

    def _need(self, piece: str, file: Union[str, Path]) -> int:
        found = self._find(piece)
        if found is None:
            raise CheckpointError(f"{file} has no piece {piece!r}; ChatGLM-6B needs one")
        return found

    def _refuse_unsafe_file(self, file: Union[str, Path]) -> None:
        for piece in SPECIAL_PIECES:
            found = self._find(piece)
            if found is not None and found not in self.special_ids:
                raise CheckpointError(
                    f"{file} has {piece!r} as ordinary text, so a user could write this special "
                    "token; it must be a control symbol"
                )
        if not self._pieces.is_byte(self._pieces.piece_to_id("<0x00>")):
            raise CheckpointError(
                f"{file} has no byte pieces, so an unknown character would become <unk>; "
                "it must be trained with byte_fallback"
            )

    def _whitespace_symbols(self, file: Union[str, Path]) -> dict[int, bytes]:
        symbols = {self._need("<n>", file): b"\n", self._need("<|tab|>", file): b"\t"}
        for length in range(2, LONGEST_BLANK + 1):
            symbols[self._need(f"<|blank_{length}|>", file)] = b" " * length
        return symbols


def _load_pieces(file: Path) -> Any:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    try:
        if content:
            return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise CheckpointError(f"{file} is not a sentencepiece model: {error}") from error
    raise CheckpointError(f"{file} is empty; it must be a sentencepiece model")


def _check_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise InvalidParameterError(f"{name} is {type(text).__name__}; it must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{name} has {text[error.start]!r} at character {error.start}, half of a surrogate "
            "pair; it must be text that UTF-8 can write"
        ) from None
