"""Tokenizers: one file per model family, and the parts that all families share.

`load_tokenizer` picks the family by the files of a checkpoint folder. `streaming.py` decodes
incrementally, and the answer readers split the text into content and tool calls. Nothing here
depends on requests, slots or MindSpore.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Union

from glm_multiuser.checkpoint.gguf.find import find_gguf
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers import chatglm2, chatglm_6b, glm4, tokenizer_json
from glm_multiuser.tokenizers.answers import AnswerEnd, AnswerReader, ContentReader
from glm_multiuser.tokenizers.base import AnswerTokens, ChatTokenizer, Vocabulary
from glm_multiuser.tokenizers.calls import ToolCall
from glm_multiuser.tokenizers.chat_template import MORE_TEMPLATES, TEMPLATE_FILE, ChatTemplate
from glm_multiuser.tokenizers.chatglm2 import ChatGLM2Tokenizer
from glm_multiuser.tokenizers.chatglm_6b import ChatGLM6BTokenizer
from glm_multiuser.tokenizers.folder import (
    ADDED_TOKENS_FILE,
    SPECIAL_TOKENS_FILE,
    end_token_ids,
    read_tokenizer_config,
)
from glm_multiuser.tokenizers.gguf import read_gguf_tokenizer
from glm_multiuser.tokenizers.glm4 import GLM4Tokenizer, GLM40414Tokenizer
from glm_multiuser.tokenizers.hugging_face import HuggingFaceTokenizer
from glm_multiuser.tokenizers.messages import rounds_of
from glm_multiuser.tokenizers.sentencepiece_file import LLAMA_FILE, read_llama_model
from glm_multiuser.tokenizers.streaming import IncrementalDetokenizer, StopStrings
from glm_multiuser.tokenizers.tiktoken_file import is_tiktoken_file

__all__ = [
    "AnswerEnd",
    "AnswerReader",
    "AnswerTokens",
    "ChatGLM2Tokenizer",
    "ChatGLM3Tokenizer",
    "ChatGLM6BTokenizer",
    "ChatGLMTokenizer",
    "ChatTokenizer",
    "ContentReader",
    "GLM4Tokenizer",
    "GLM40414Tokenizer",
    "HuggingFaceTokenizer",
    "IncrementalDetokenizer",
    "Qwen2Tokenizer",
    "StopStrings",
    "ToolCall",
    "load_tokenizer",
    "rounds_of",
]

# Names of version 0.1.
ChatGLMTokenizer = ChatGLM6BTokenizer
ChatGLM3Tokenizer = ChatGLM2Tokenizer
Qwen2Tokenizer = HuggingFaceTokenizer

TOKENIZER_FILES = (
    "tokenizer_config.json",
    chatglm_6b.VOCABULARY_FILE,
    chatglm2.VOCABULARY_FILE,
    tokenizer_json.VOCABULARY_FILE,
    *tokenizer_json.OLDER_FILES,
    TEMPLATE_FILE,
    MORE_TEMPLATES,
)
"""Names and patterns; any of these names marks a folder with a tokenizer."""

FILES_READ = (*TOKENIZER_FILES, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, "generation_config.json")
"""Names and patterns of all files that a tokenizer is made from."""


def load_tokenizer(folder: Union[str, Path]) -> Optional[ChatTokenizer]:
    """Loads the tokenizer of a checkpoint folder in Hugging Face layout, or of a GGUF file.

    Returns None for a checkpoint without a tokenizer, which is served with token ids.

    Raises:
        CheckpointError: missing folder, unreadable file, or unsupported family.
    """
    folder = Path(folder)
    gguf = find_gguf(folder)
    if gguf is not None:
        found = read_gguf_tokenizer(gguf)
        return None if found is None else _choose(*found)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    present = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not present:
        return None
    json_files = (tokenizer_json.VOCABULARY_FILE, *tokenizer_json.OLDER_FILES)
    has_json = any(name in present for name in json_files)
    default_class = "" if has_json else "ChatGLMTokenizer"
    tokenizer_class = str(read_tokenizer_config(folder).get("tokenizer_class", default_class))
    # ChatGLM-6B, ChatGLM2, ChatGLM3 and early GLM-4 files share a class name: only the files
    # tell them apart.
    if tokenizer_class.startswith("ChatGLM"):
        if chatglm_6b.VOCABULARY_FILE in present:
            return ChatGLM6BTokenizer.from_folder(folder)
        if chatglm2.VOCABULARY_FILE in present:
            file = folder / chatglm2.VOCABULARY_FILE
            if is_tiktoken_file(file):
                return GLM4Tokenizer.from_file(file, ChatTemplate.from_folder(folder))
            return ChatGLM2Tokenizer.from_folder(folder)
    if has_json:
        return _load_hugging_face(folder, tokenizer_json.read_hugging_face_files(folder))
    if tokenizer_class.startswith("Llama") and LLAMA_FILE in present:
        return _load_hugging_face(folder, read_llama_model(folder))
    raise CheckpointError(
        f"{folder} has tokenizer_class {tokenizer_class!r} and the files {', '.join(present)}; "
        f"this version reads ChatGLM tokenizers with {chatglm_6b.VOCABULARY_FILE} or "
        f"{chatglm2.VOCABULARY_FILE}, Llama's with {LLAMA_FILE}, others with "
        f"{tokenizer_json.VOCABULARY_FILE} or {' and '.join(tokenizer_json.OLDER_FILES)}"
    )


def _load_hugging_face(folder: Path, vocabulary: Vocabulary) -> ChatTokenizer:
    stops = end_token_ids(folder, vocabulary.special)
    return _choose(vocabulary, ChatTemplate.from_folder(folder), stops)


def _choose(
    vocabulary: Vocabulary, template: Optional[ChatTemplate], stops: tuple[int, ...]
) -> ChatTokenizer:
    if all(name in vocabulary.special for name in chatglm2.SPECIAL_TOKENS[3]):
        return chatglm2.ChatGLM3WithSpecialTokens(vocabulary, stops)
    if not all(name in vocabulary.special for name in glm4.NEEDED):
        return HuggingFaceTokenizer(vocabulary, template, stops)
    # GLM-4's own template renders tools of messages, but not a request's.
    if template is None or ("tools" in template.source and not template.takes_tools):
        return GLM4Tokenizer(vocabulary, template)
    return GLM40414Tokenizer(vocabulary, template, stops)
