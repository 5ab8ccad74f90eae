"""A tokenizer for the mock's vocabulary, whose pieces do not end where characters or words do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from glm_multiuser.tokenizers import AnswerReader, IncrementalDetokenizer
from glm_multiuser.tokenizers.answers import PlainAnswerReader
from glm_multiuser.tokenizers.history import messages_of
from glm_multiuser.tokenizers.messages import read_messages, refuse_tools
from tests.engine.mock_runner import EOS, FAILS_LATER, VOCAB

PIECES: dict[int, bytes] = {
    EOS: b"",
    1: b"ab",
    2: b"c",
    3: b"cd",
    4: "你".encode()[:1],
    5: "你".encode()[1:],
    6: b"[",
    **{number: bytes([ord("A") + number - 7]) for number in range(7, 33)},
    **{number: b" word%d" % number for number in range(33, VOCAB)},
}


class FakeTokenizer:
    """Fulfils `ChatTokenizer`."""

    vocab_size = VOCAB
    stop_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return [1 + ord(character) % (FAILS_LATER - 1) for character in text]

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        return self.encode_messages(messages_of(query, history))

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        refuse_tools(tools, "the mock")
        told = read_messages(messages, with_tools=False)
        texts = [message.content for message in told]
        return self.encode("|".join(texts if told[0].role == "system" else ["", *texts]))

    def answer_reader(self, tools: Sequence[Mapping[str, Any]] = ()) -> AnswerReader:
        refuse_tools(tools, "the mock")
        return PlainAnswerReader()

    def decode(self, token_ids: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(PIECES.__getitem__, replacements=[("[A]", "[a]")])

    def process_response(self, text: str) -> str:
        return f"<{text}>"
