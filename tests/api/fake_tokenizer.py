"""A tokenizer for the mock's vocabulary, whose pieces do not end where characters or words do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm_multiuser.tokenizers import AnswerReader, ChatTokenizer
from glm_multiuser.tokenizers.base import Vocabulary
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


class FakeTokenizer(ChatTokenizer):
    stop_token_ids = (EOS,)

    def __init__(self) -> None:
        super().__init__(Vocabulary(_encode, PIECES, {}), replacements=[("[A]", "[a]")])

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_final_message: bool = False,
    ) -> list[int]:
        refuse_tools(tools, "the mock")
        told = read_messages(
            messages, with_tools=False, continue_final_message=continue_final_message
        )
        texts = [message.content for message in told]
        return self.encode("|".join(texts if told[0].role == "system" else ["", *texts]))

    def answer_reader(
        self, tools: Sequence[Mapping[str, Any]] = (), *, continued: bool = False
    ) -> AnswerReader:
        refuse_tools(tools, "the mock")
        return AnswerReader()

    def process_response(self, text: str) -> str:
        return f"<{text}>"


def _encode(text: str) -> list[int]:
    return [1 + ord(character) % (FAILS_LATER - 1) for character in text]
