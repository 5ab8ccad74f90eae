"""Special tokens: where a folder names them, and what prompts make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.tokenizers import HuggingFaceTokenizer
from tests.tokenizers.conftest import write_config

END = "<|im_end|>"
START: dict[str, Any] = {"content": "<|im_start|>", "lstrip": False, "rstrip": False}


class TestNames:
    @pytest.mark.parametrize(
        ("config", "others", "text"),
        [
            ({}, {}, "{eos_token: <|im_end|>}"),
            ({"bos_token": None, "pad_token": ""}, {}, "{pad_token: }{eos_token: <|im_end|>}"),
            (
                {"sep_token": END, "image_token": "<i>", "add_bos_token": True},
                {},
                "{sep_token: <|im_end|>}{image_token: <i>}{eos_token: <|im_end|>}",
            ),
            (
                {"extra_special_tokens": {"the_image": "<i>"}},
                {},
                "{the_image: <i>}{eos_token: <|im_end|>}",
            ),
            (
                {"pad_token": END},
                {"bos_token": START, "pad_token": "<|endoftext|>"},
                "{bos_token: <|im_start|>}{pad_token: <|endoftext|>}{eos_token: <|im_end|>}",
            ),
            (
                {"added_tokens_decoder": {"400": {**START, "special": True}}},
                {"bos_token": START},
                "{eos_token: <|im_end|>}",
            ),
        ],
    )
    def test_names_in_templates_are_those_of_transformers(
        self, copied: Path, config: dict[str, Any], others: dict[str, Any], text: str
    ) -> None:
        # By `apply_chat_template` of transformers 5.24.0.
        names = ["bos_token", "unk_token", "sep_token", "pad_token", "image_token", "the_image"]
        template = "".join(
            f"{{% if {name} is defined %}}{{{{ '{{{name}: ' ~ {name} ~ '}}' }}}}{{% endif %}}"
            for name in [*names, "eos_token", "additional_special_tokens"]
        )
        write_config(copied, eos_token=END, chat_template=template, **config)
        (copied / "special_tokens_map.json").write_text(json.dumps(others), "utf-8")
        found = HuggingFaceTokenizer.from_folder(copied)
        ids = found.encode_prompt("a")
        assert b"".join(map(found.token_bytes, ids)).decode() == text

    def test_documents_are_none(self, copied: Path) -> None:
        write_config(copied, eos_token=END, chat_template="{{ documents is none }}")
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.decode(found.encode_prompt("a")) == "True"

    def test_an_end_of_the_other_file(self, copied: Path) -> None:
        write_config(copied, chat_template="a")
        (copied / "special_tokens_map.json").write_text('{"eos_token": "</tool_call>"}', "utf-8")
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.stop_token_ids[0] == found.special["</tool_call>"]
