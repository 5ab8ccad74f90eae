"""Base class of the tokenizers, and the vocabulary that they encode and decode with."""

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
"""A character in no vocabulary: it becomes bytes, which never merge with the text after them."""


def encode_without_prefix(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Encodes text without the space that a vocabulary may put before it."""
    return encode(NEVER_MERGED + text)[len(encode(NEVER_MERGED)) :]


@dataclass(frozen=True)
class Vocabulary:
    """The content of a vocabulary file.

    Attributes:
        encode: encodes text to ids, none of them in `special`.
        pieces: the bytes that an id adds to an answer; ids that add none are absent.
        special: ids by name that text never encodes to. Those with a piece (such as
            `<tool_call>` of Qwen2.5) are shown in answers.
        first_pieces: pieces that differ at the start of an answer, where decoding drops the
            leading space.
        drops_every_leading_space: whether decoding drops all leading spaces, not only one.
        errors: `codecs` error handler for bytes that are not UTF-8.
        encode_after_special: `encode` for text after a special token, if it differs.
        begin_id: first id of every prompt, whether a chat template writes it or not.
        strips: special tokens that absorb the whitespace (before, after) them.
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
    """Decodes the ids of one answer to bytes, without the space at its start.

    Args:
        names: names of the special tokens.
        separator: the id that begins the next message of the same answer; its name is shown.
        continued: whether the prompt contains the start of the answer.
        strips: whether to drop all whitespace at the start of a message.
        exact: whether to drop no more than a single space and the header.
        header: hidden text at the start of the answer.
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
        """Returns the bytes that this id would add (possibly a partial character); the name of a
        special token."""
        return self.names.get(token_id) or self._piece(token_id)[len(self._header) :]

    def add(self, token_id: int) -> bytes:
        """Takes the next id and returns its bytes; a special token adds none."""
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
    """Encodes and decodes text; subclasses add the family's prompt format and stop tokens.

    Immutable after construction, so threads may share it.

    Args:
        vocabulary: the family's vocabulary.
        replacements: (old, new) pairs applied to every decoded text.

    Attributes:
        separator: name of the special token that begins the next message of the same answer
            (`<|assistant|>` of ChatGLM3 and GLM-4). Answers show it, for `answer_reader` and
            `process_response`.
        separator_id: its id; None if the vocabulary has none.
        vocab_size: highest id plus one; a model's vocabulary may be padded.
        special: ids of the special tokens by name.
        special_ids: ids that text never encodes to.
        stop_token_ids: ids that end an answer.
        calls_are_json: whether the family writes call arguments as JSON, so that a grammar for
            them does not change the form of an answer.
    """

    separator: ClassVar[str] = ""
    calls_are_json: ClassVar[bool] = True
    stop_token_ids: tuple[int, ...]
    _strips_answers = False
    """Whether `answer_reader` drops the whitespace at the start of an answer."""

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
        """Encodes a conversation in OpenAI's format to a prompt.

        Args:
            messages: of roles system, user, assistant and tool (a tool's result); an assistant
                message may have `tool_calls`, and then its content may be None.
            tools: functions the model may call, `{"type": "function", "function": {...}}`.
            continue_final_message: whether the last message, an assistant's, starts the answer:
                the prompt ends after it.

        Raises:
            InvalidParameterError: invalid role or shape, an order unsupported by the family's
                chat format, or tools for a family that was not trained on them.
        """

    @abstractmethod
    def answer_reader(self, tools: Objects = (), *, continued: bool = False) -> AnswerReader:
        """Returns a reader that splits one decoded answer into content and calls of these tools.

        With `continued`, the prompt contains the start of the answer.

        Raises:
            InvalidParameterError: as `encode_messages`, for tools.
        """

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        """Encodes a query with its history as `encode_messages` does.

        Raises:
            InvalidParameterError: a query that is not a string, a history that `rounds_of`
                rejects, or as `encode_messages`.
        """
        return self.encode_messages(messages_of(query, history))

    def encode(self, text: str) -> list[int]:
        """Encodes raw text, adding nothing; text never becomes a special token.

        Raises:
            InvalidParameterError: not a string, or a lone surrogate in it.
        """
        return self._vocabulary.encode(check_text(text, "text"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes an answer; unknown ids and special tokens except `separator` add no text."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes of one id, perhaps part of a character; a special token's name.

        An id outside the vocabulary has no bytes.
        """
        return self._names.get(token_id) or self._vocabulary.pieces.get(token_id, b"")

    def answer_tokens(
        self, *, continued: bool = False, raw: bool = False, exact: bool = False
    ) -> AnswerTokens:
        """Returns a decoder of one answer to bytes that join to its content, for log-probabilities.

        Only `replacements`, which span tokens, are not applied.

        Args:
            continued: whether the prompt contains the start of the answer.
            raw: whether the answer is shown as generated, without an `answer_reader`.
            exact: whether a grammar writes the dropped text: a single space, and unless raw the
                `content_header`.
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
        """Returns a detokenizer for one answer; its deltas join to what `decode` returns.

        With `continued`, the prompt contains the start of the answer, and no space is dropped.
        With `exact`, `replacements` are not applied, because the answer has a grammar.
        """
        tokens = self.answer_tokens(continued=continued, raw=True, exact=exact)
        replacements = () if exact else self._replacements
        return IncrementalDetokenizer(
            tokens.add, errors=self._vocabulary.errors, replacements=replacements
        )

    def encode_inside(self, text: str) -> list[int]:
        """Encodes raw text in the middle of an answer, without a space before it."""
        encode = self._vocabulary.encode
        adds_space = bool(self._vocabulary.first_pieces)
        return encode_without_prefix(encode, text) if adds_space else encode(text)

    def token_table(self, size: int) -> list[bytes]:
        """Returns the bytes of ids 0 to `size` - 1, b"" for those that a grammar must not use.

        If decoding drops the space at the start of an answer, these include tokens whose space it
        would not drop, such as the space's byte and `<|blank_2|>` of ChatGLM-6B.
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
        """Returns the text before the content of an answer with a grammar, as in `content_rule`.

        It omits the space that decoding drops. With `continued`, the prompt contains the start of
        the answer.
        """
        return ""

    def content_rule(self, content: str, *, continued: bool = False, raw: bool = False) -> str:
        """Returns the rule of an answer with this content; see forms.py.

        Args:
            content: a rule.
            continued, raw: as in `answer_tokens`.
        """
        drops_space = self._vocabulary.first_pieces and not continued
        return sequence(literal(" ") if drops_space else "", content)

    def call_rule(self, name: str, arguments: str) -> str:
        """Returns the rule of a call of the function `name`, in the format of `answer_reader`.

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
        """Returns the rule of an answer that is content, or calls, possibly after content.

        Args:
            calls: their rules; any may follow each other.
            content: the rule of content; None: any text.
        """
        return one_of([self.content_rule(content or ANY_TEXT), *calls])

    def process_response(self, text: str) -> str:
        """Post-processes a complete answer as the family's original code does, if it does."""
        return text
