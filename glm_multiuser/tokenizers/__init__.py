"""Text to token ids and back: one file per model family, and what all families share.

`load_tokenizer` picks the family by the files of a checkpoint folder. `streaming.py` turns ids
into text while they arrive, `stop_strings.py` cuts that text where the caller wants it to end.
Nothing in here knows about requests, slots or MindSpore.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Protocol, Union

from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.chatglm import VOCABULARY_FILE, ChatGLMTokenizer
from glm_multiuser.tokenizers.folder import read_tokenizer_config
from glm_multiuser.tokenizers.history import rounds_of
from glm_multiuser.tokenizers.stop_strings import StopStrings
from glm_multiuser.tokenizers.streaming import IncrementalDetokenizer

__all__ = [
    "ChatGLMTokenizer",
    "ChatTokenizer",
    "IncrementalDetokenizer",
    "StopStrings",
    "load_tokenizer",
    "rounds_of",
]

TOKENIZER_FILES = (
    "tokenizer_config.json",
    VOCABULARY_FILE,
    "tokenizer.model",
    "tokenizer.json",
    "vocab.json",
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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer; special tokens stand for no text."""
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
    tokenizer_class = read_tokenizer_config(folder).get("tokenizer_class", "ChatGLMTokenizer")
    # ChatGLM2 and ChatGLM3 call their class ChatGLMTokenizer too: only the file tells them apart.
    if tokenizer_class == "ChatGLMTokenizer" and VOCABULARY_FILE in present:
        return ChatGLMTokenizer.from_folder(folder)
    raise CheckpointError(
        f"{folder} has tokenizer_class {tokenizer_class!r} and the files {', '.join(present)}; "
        f"this version reads 'ChatGLMTokenizer' with {VOCABULARY_FILE}"
    )
