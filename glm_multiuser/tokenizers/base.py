"""What every tokenizer does the same way: a vocabulary, and text to ids and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.answers import AnswerReader
from glm_multiuser.tokenizers.forms import ANY_TEXT, literal, one_of, sequence
from glm_multiuser.tokenizers.messages import messages_of
from glm_multiuser.tokenizers.streaming import IncrementalDetokenizer
from glm_multiuser.tokenizers.text import Objects, check_text

NEVER_MERGED = "\U0010fffd"
"""A character of no vocabulary: it becomes bytes, which are not merged with what follows."""


@dataclass(frozen=True)
class Vocabulary:
    """The content of a vocabulary file.

    Attributes:
        encode: ids of a text, none of them in `special`.
        pieces: the bytes that an id adds to an answer; ids that add none are not in here.
        special: ids that no text becomes, by name. Some have a piece (such as `<tool_call>` of
            Qwen2.5): answers show them.
        first_pieces: pieces that read differently at the beginning of an answer, because
            decoding drops the space there.
        drops_every_leading_space: whether it drops all of them, not only one.
        errors: how bytes that are no UTF-8 are shown, an error handler of `codecs`.
        encode_after_special: `encode` for a text after a special token, where that differs.
        begin_id: what every prompt begins with, whether a chat template writes it or not.
        strips: names of special tokens that take in the whitespace before or after them.
    """

    encode: Callable[[str], list[int]]
    pieces: Mapping[int, bytes]
    special: Mapping[str, int]
    first_pieces: Mapping[int, bytes] = field(default_factory=dict)
    drops_every_leading_space: bool = False
    errors: str = "replace"
    encode_after_special: Optional[Callable[[str], list[int]]] = None
    begin_id: Optional[int] = None
    strips: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class AnswerTokens:
    """The bytes that ids add to one answer: decoding drops a space at its beginning.

    Args:
        names: of special tokens.
        separator: the id that begins the next message of the same answer; its name is shown.
        continued: whether the beginning of the answer is in the prompt.
        strips: whether all whitespace at the beginning of a message is dropped.
        exact: whether no more than a single space and the header are dropped.
        header: what the answer begins with and does not show.
    """

    vocabulary: Vocabulary
    names: Mapping[int, bytes]
    separator: Optional[int]
    continued: bool
    strips: bool
    exact: bool = False
    header: bytes = b""

    def __post_init__(self) -> None:
        self._at_start = not self.continued
        self._header = self.header

    def shown(self, token_id: int) -> bytes:
        """What this id would add next, perhaps a part of a character; a special token's name."""
        return self.names.get(token_id) or self._piece(token_id)[len(self._header) :]

    def add(self, token_id: int) -> bytes:
        """What this id adds, which is the next one; a special token adds nothing."""
        token_id = int(token_id)
        if token_id == self.separator:
            self._at_start = True
            return self.names[token_id]
        piece = self._piece(token_id)
        if token_id in self.vocabulary.pieces:
            drops_every = self.vocabulary.drops_every_leading_space and not self.exact
            self._at_start = self._at_start and (self.strips or drops_every) and not piece
        shown, self._header = piece[len(self._header) :], self._header[len(piece) :]
        return shown

    def _piece(self, token_id: int) -> bytes:
        piece = self.vocabulary.pieces.get(token_id, b"")
        if not self._at_start:
            return piece
        piece = self.vocabulary.first_pieces.get(token_id, piece)
        return piece.lstrip() if self.strips else piece


class ChatTokenizer(ABC):
    """Text to ids and back; a family adds the form of its prompts and how answers end.

    The object is never changed after its construction: any number of threads may use it.

    Args:
        vocabulary: of the family's file.
        replacements: (old, new) pairs applied to every decoded text.

    Attributes:
        separator: name of the special token that begins the next message of the same answer
            (`<|assistant|>` of ChatGLM3 and GLM-4). Answers show it, for `answer_reader` and
            `process_response`.
        separator_id: its id; None: the vocabulary has none.
        vocab_size: one more than the highest id; a model's vocabulary may be padded.
        special: id of each special token by its name.
        special_ids: ids that no text becomes.
        stop_token_ids: ids that end an answer.
        calls_are_json: whether the family writes the arguments of calls as JSON, so that a grammar
            for them does not change how an answer is written.
    """

    separator: ClassVar[str] = ""
    calls_are_json: ClassVar[bool] = True
    stop_token_ids: tuple[int, ...]
    _strips_answers = False
    """Whether answers begin with whitespace that `answer_reader` drops."""

    def __init__(
        self, vocabulary: Vocabulary, *, replacements: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._replacements = replacements
        self.separator_id = vocabulary.special.get(self.separator)
        self._names = {one: name.encode("utf-8") for name, one in vocabulary.special.items()}
        self.special = vocabulary.special
        self.special_ids = frozenset(vocabulary.special.values())
        self.vocab_size = 1 + max([*vocabulary.pieces, *self.special_ids])

    @abstractmethod
    def encode_messages(
        self, messages: Objects, tools: Objects = (), *, continue_final_message: bool = False
    ) -> list[int]:
        """Ids of a whole conversation in OpenAI's shape, which awaits an answer.

        Args:
            messages: of roles system, user, assistant and tool (what a tool returned); an
                assistant's may have `tool_calls`, and then its content may be None.
            tools: what the model may call, `{"type": "function", "function": {...}}`.
            continue_final_message: whether the last message, an assistant's, is the beginning of
                the answer: the prompt ends after it.

        Raises:
            InvalidParameterError: another role or shape, an order that the family's chat format
                does not have, or tools for a family that was not trained on them.
        """

    @abstractmethod
    def answer_reader(self, tools: Objects = (), *, continued: bool = False) -> AnswerReader:
        """A new reader that splits one decoded answer into content and calls of these tools.

        With `continued`, the beginning of the answer is in the prompt.

        Raises:
            InvalidParameterError: as `encode_messages` does for tools.
        """

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        """Ids of a question with its history, in the form of `encode_messages`.

        Raises:
            InvalidParameterError: a query that is not a string, a history that `rounds_of` does
                not read, or what `encode_messages` raises.
        """
        return self.encode_messages(messages_of(query, history))

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, without anything added; no text becomes a special token.

        Raises:
            InvalidParameterError: not a string, or half of a surrogate pair in it.
        """
        return self._vocabulary.encode(check_text(text, "text"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer; special tokens but `separator`, and unknown ids, add no text."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one id by itself, perhaps a part of a character; a special token's name.

        An id beyond the vocabulary has no bytes.
        """
        return self._names.get(token_id) or self._vocabulary.pieces.get(token_id, b"")

    def answer_tokens(
        self, *, continued: bool = False, raw: bool = False, exact: bool = False
    ) -> AnswerTokens:
        """The bytes of one answer's tokens, which join to its content, for log-probabilities.

        Only `replacements`, which change texts of several tokens, are not applied.

        Args:
            continued: whether the beginning of the answer is in the prompt.
            raw: whether the answer is shown as the model writes it, without an `answer_reader`.
            exact: whether it has a grammar, which writes what is dropped: a single space, and
                the `content_header` of one that is not raw.
        """
        strips = self._strips_answers and not raw and not exact
        header = self.content_header(continued=continued) if exact and not raw else ""
        return AnswerTokens(
            self._vocabulary,
            self._names,
            self.separator_id,
            continued,
            strips,
            exact,
            header.encode(),
        )

    def detokenizer(
        self, *, continued: bool = False, exact: bool = False
    ) -> IncrementalDetokenizer:
        """A detokenizer for one answer; its deltas join to what `decode` returns.

        With `continued`, the beginning of the answer is in the prompt, and no space is dropped.
        With `exact`, `replacements` are not applied: the answer has a grammar.
        """
        tokens = self.answer_tokens(continued=continued, raw=True, exact=exact)
        replacements = () if exact else self._replacements
        return IncrementalDetokenizer(
            tokens.add, errors=self._vocabulary.errors, replacements=replacements
        )

    def encode_inside(self, text: str) -> list[int]:
        """Ids of raw text in the middle of an answer: no space is put before it."""
        encode = self._vocabulary.encode
        if not self._vocabulary.first_pieces:
            return encode(text)
        return encode(NEVER_MERGED + text)[len(encode(NEVER_MERGED)) :]

    def token_table(self, size: int) -> list[bytes]:
        """The bytes of the ids 0 to `size` - 1 as a grammar sees them, b"" for unknown ones.

        Where decoding drops a space at the beginning of an answer, whatever else begins with one
        is unknown, too, such as the byte of a space and `<|blank_2|>` of ChatGLM-6B: it would not
        be dropped.
        """
        table = [self.token_bytes(one) for one in range(size)]
        first = self._vocabulary.first_pieces
        if first:
            table = [
                b"" if one.startswith(b" ") and at not in first else one
                for at, one in enumerate(table)
            ]
        return table

    @property
    def call_token_ids(self) -> frozenset[int]:
        """Special tokens that calls are written with."""
        return frozenset()

    def content_header(self, *, continued: bool = False) -> str:
        """What an answer with a grammar of content has before it, as `content_rule` writes it.

        Without the space that decoding drops. With `continued`, the beginning of the answer is in
        the prompt.
        """
        return ""

    def content_rule(self, content: str, *, continued: bool = False, raw: bool = False) -> str:
        """How an answer with this content is written; see forms.py.

        Args:
            content: a rule.
            continued, raw: as in `answer_tokens`.
        """
        drops_space = self._vocabulary.first_pieces and not continued
        return sequence(literal(" ") if drops_space else "", content)

    def call_rule(self, name: str, arguments: str) -> str:
        """How a call of the function `name` is written, as the `answer_reader` reads it back.

        Args:
            name: of a function.
            arguments: the rule of a JSON object.

        Raises:
            InvalidParameterError: the family was not trained on tools.
        """
        raise InvalidParameterError(
            f"tools has {name[:80]!r}; this model was not trained on tools, so it must be empty",
            field="tools",
        )

    def calls_rule(self, calls: Sequence[str], content: Optional[str] = None) -> str:
        """How an answer is written that is content, or calls, perhaps after content.

        Args:
            calls: of which rules any may follow each other.
            content: the rule of content; None: any text.
        """
        return one_of([self.content_rule(content or ANY_TEXT), *calls])

    def process_response(self, text: str) -> str:
        """The family's own last change to a complete answer; none unless it has one."""
        return text
