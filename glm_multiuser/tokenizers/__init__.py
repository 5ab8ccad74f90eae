"""Text to token ids and back: one file per model family, and what all families share.

`load_tokenizer` picks the family by the files of a checkpoint folder. `streaming.py` turns ids
into text while they arrive, `stop_strings.py` cuts that text where the caller wants it to end,
and `answers.py` says what is content in it and what calls a tool.
Nothing in here knows about requests, slots or MindSpore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Protocol, Union

from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers import chatglm, chatglm3, glm4, hugging_face_file
from glm_multiuser.tokenizers.answers import AnswerEnd, AnswerReader, ToolCall
from glm_multiuser.tokenizers.chat_template import TEMPLATE_FILE
from glm_multiuser.tokenizers.chatglm import ChatGLMTokenizer
from glm_multiuser.tokenizers.chatglm3 import ChatGLM3Tokenizer
from glm_multiuser.tokenizers.folder import read_tokenizer_config
from glm_multiuser.tokenizers.glm4 import GLM4Tokenizer
from glm_multiuser.tokenizers.history import rounds_of
from glm_multiuser.tokenizers.qwen2 import Qwen2Tokenizer
from glm_multiuser.tokenizers.stop_strings import StopStrings
from glm_multiuser.tokenizers.streaming import IncrementalDetokenizer
from glm_multiuser.tokenizers.tiktoken_file import is_tiktoken_file

__all__ = [
    "AnswerEnd",
    "AnswerReader",
    "ChatGLM3Tokenizer",
    "ChatGLMTokenizer",
    "ChatTokenizer",
    "GLM4Tokenizer",
    "IncrementalDetokenizer",
    "Qwen2Tokenizer",
    "StopStrings",
    "ToolCall",
    "load_tokenizer",
    "rounds_of",
]

TOKENIZER_FILES = (
    "tokenizer_config.json",
    chatglm.VOCABULARY_FILE,
    chatglm3.VOCABULARY_FILE,
    hugging_face_file.VOCABULARY_FILE,
    *hugging_face_file.OLDER_FILES,
    TEMPLATE_FILE,
)
"""A folder with any of these claims to have a tokenizer."""


class ChatTokenizer(Protocol):
    """What a family's tokenizer offers to the rest of the library.

    A tokenizer holds no state of a request, so one object serves every thread.
    """

    @property
    def vocab_size(self) -> int:
        """Ids below this one stand for pieces of the vocabulary file."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of raw text; nothing that a user types becomes a special token."""
        ...

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        """Ids of a question with its history, in the form that the family was trained on."""
        ...

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of a whole conversation in OpenAI's shape, whose last message awaits an answer.

        Args:
            messages: of roles system (only first), user, assistant and tool (what a tool
                returned); an assistant's may have `tool_calls`, and then its content may be
                None.
            tools: what the model may call, `{"type": "function", "function": {...}}`.

        Raises:
            InvalidParameterError: another order, role or shape, or tools for a family that was
                not trained on them.
        """
        ...

    def answer_reader(self, tools: Sequence[Mapping[str, Any]] = ()) -> AnswerReader:
        """A new reader that splits one decoded answer into content and calls of these tools.

        Raises:
            InvalidParameterError: as `encode_messages` does for tools.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer; special tokens stand for no text.

        Only the one that begins the next message of the same answer (`<|assistant|>` of ChatGLM3
        and GLM-4) is written as its name, for `answer_reader` and `process_response`.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one id by itself, perhaps a part of a character; a special token's name."""
        ...

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new detokenizer whose deltas join to exactly what `decode` returns."""
        ...

    def process_response(self, text: str) -> str:
        """The family's own last touch on a complete answer."""
        ...


def load_tokenizer(folder: Union[str, Path]) -> Optional[ChatTokenizer]:
    """Loads the tokenizer that lies beside a model's weights.

    Args:
        folder: a checkpoint folder in Hugging Face layout.

    Returns:
        The tokenizer, or None when the folder holds no tokenizer files: such a checkpoint is
        served with token ids.

    Raises:
        CheckpointError: no such folder, a file that cannot be read, or a family that this
            version does not read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        return None
    tokenizer_class = str(read_tokenizer_config(folder).get("tokenizer_class", "ChatGLMTokenizer"))
    # ChatGLM2, ChatGLM3 and early files of GLM-4 call their class as ChatGLM-6B does: only the
    # files tell them apart.
    if tokenizer_class.startswith("ChatGLM"):
        if chatglm.VOCABULARY_FILE in present:
            return ChatGLMTokenizer.from_folder(folder)
        if chatglm3.VOCABULARY_FILE in present:
            file = folder / chatglm3.VOCABULARY_FILE
            if is_tiktoken_file(file):
                return GLM4Tokenizer.from_file(file)
            return ChatGLM3Tokenizer.from_folder(folder)
    json_files = (hugging_face_file.VOCABULARY_FILE, *hugging_face_file.OLDER_FILES)
    if any(name in present for name in json_files):
        return load_hugging_face(folder)
    raise CheckpointError(
        f"{folder} has tokenizer_class {tokenizer_class!r} and the files {', '.join(present)}; "
        f"this version reads ChatGLM tokenizers with {chatglm.VOCABULARY_FILE} or "
        f"{chatglm3.VOCABULARY_FILE}, others with {hugging_face_file.VOCABULARY_FILE} or "
        f"{' and '.join(hugging_face_file.OLDER_FILES)}"
    )


def load_hugging_face(folder: Path) -> ChatTokenizer:
    """Loads Qwen2, or GLM-4 from its files in the layout of transformers (glm-4-9b-chat-hf).

    Raises:
        CheckpointError: a file that is missing or broken.
    """
    vocabulary = hugging_face_file.read_hugging_face_files(folder)
    if all(name in vocabulary.special for name in glm4.NEEDED):
        return GLM4Tokenizer(vocabulary, folder)
    return Qwen2Tokenizer.from_folder(folder, vocabulary)
