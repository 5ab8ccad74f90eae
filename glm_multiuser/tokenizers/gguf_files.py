"""Writes the tokenizer of a GGUF file in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm_multiuser.checkpoint.files import write_json
from glm_multiuser.checkpoint.gguf.config import gguf_generation_values
from glm_multiuser.checkpoint.gguf.file import open_gguf
from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.chat_template import TEMPLATE_FILE, ChatTemplate
from glm_multiuser.tokenizers.gguf import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    adds_space_prefix,
    read_gguf_tokenizer,
    read_pieces,
    sentencepiece_model,
    tokenizer_json,
)
from glm_multiuser.tokenizers.sentencepiece_file import LLAMA_FILE
from glm_multiuser.tokenizers.tokenizer_json import VOCABULARY_FILE


def write_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Writes vocabulary, chat template and stop token ids; nothing for a file without a tokenizer.

    Raises:
        CheckpointError: as `read_gguf_tokenizer`.
    """
    tokenizer, pieces = read_gguf_tokenizer(path), read_pieces(open_gguf(path))
    if tokenizer is None or pieces is None:
        return
    settings: dict[str, Any] = {name: text for name, text in pieces.names_of_ids().items() if text}
    template = tokenizer.template
    if template is not None:
        # Only a template begins the prompts of a folder.
        begins = tokenizer.vocabulary.begin_id is not None
        sources = [
            "{{ bos_token }}" + one.source
            if begins and not _begins(one, settings["bos_token"])
            else one.source
            for one in (template, template.for_tools)
        ]
        if template.for_tools is template:
            (folder / TEMPLATE_FILE).write_text(sources[0], encoding="utf-8")
        else:
            settings["chat_template"] = [
                {"name": name, "template": one}
                for name, one in zip(("default", "tool_use"), sources)
            ]
    if pieces.model == "gpt2":
        write_json(folder / VOCABULARY_FILE, tokenizer_json(pieces))
        write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", **settings},
        )
    else:
        (folder / LLAMA_FILE).write_bytes(sentencepiece_model(pieces))
        hidden, shown = pieces.of_type(CONTROL, UNKNOWN), pieces.of_type(USER_DEFINED)
        added = {
            str(token_id): {"content": name, "special": name in hidden}
            for name, token_id in {**hidden, **shown}.items()
        }
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "LlamaTokenizer",
                "add_prefix_space": adds_space_prefix(pieces),
                "added_tokens_decoder": added,
                **settings,
            },
        )
    ends = {"eos_token_id": list(tokenizer.stop_token_ids)}
    write_json(folder / "generation_config.json", {**gguf_generation_values(path), **ends})


def _begins(template: ChatTemplate, beginning: str) -> bool:
    """Whether the template writes this token, by its name or as text."""
    if "bos_token" in template.source:
        return True
    try:
        return template.render([{"role": "user", "content": ""}]).startswith(beginning)
    except InvalidParameterError:  # it needs something else
        return template.source.lstrip().startswith(beginning)
