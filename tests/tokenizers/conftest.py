"""The tokenizers that the tests run on: real ones, the reference's small ones, trained ones."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from glm_multiuser.tokenizers import (
    ChatGLM2Tokenizer,
    ChatGLM6BTokenizer,
    ChatTokenizer,
    GLM4Tokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
)
from tests.golden_data import golden_folder
from tests.tokenizers import templates

CONTROL = ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"]
WHITESPACE = ["<n>", "<|tab|>", *(f"<|blank_{length}|>" for length in range(2, 81))]
CORPUS = ["你好,世界! It's fine, isn't it? the quick brown fox. 你是谁"] * 3

TrainFile = Callable[..., Path]


@pytest.fixture(scope="session")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> TrainFile:
    """Trains a vocabulary file of a few hundred pieces; options go to the trainer."""

    def train(**options: Any) -> Path:
        content = io.BytesIO()
        settings: dict[str, Any] = {
            "vocab_size": 400,
            "hard_vocab_limit": False,
            "byte_fallback": True,
            "pad_id": 3,
            "control_symbols": CONTROL,
            "user_defined_symbols": WHITESPACE,
            "minloglevel": 2,
            **options,
        }
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=content, **settings
        )
        file = tmp_path_factory.mktemp("vocabulary") / "ice_text.model"
        file.write_bytes(content.getvalue())
        return file

    return train


@pytest.fixture(scope="session")
def trained_file(train_file: TrainFile) -> Path:
    return train_file()


@pytest.fixture(scope="session")
def real_folder() -> Path:
    return golden_folder("tokenizer_chatglm_6b", "golden.json", "ice_text.model")


@pytest.fixture(scope="session")
def real(real_folder: Path) -> ChatGLM6BTokenizer:
    return ChatGLM6BTokenizer.from_folder(real_folder)


@pytest.fixture(scope="session")
def golden(real_folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((real_folder / "golden.json").read_text("utf-8"))
    return values


@pytest.fixture(scope="session", params=["trained", "end_to_end", "real"])
def file(request: pytest.FixtureRequest) -> Path:
    """One vocabulary file after the other."""
    if request.param == "trained":
        found: Path = request.getfixturevalue("trained_file")
        return found
    name = {"end_to_end": "e2e_chatglm_6b", "real": "tokenizer_chatglm_6b"}[request.param]
    return golden_folder(name, "ice_text.model") / "ice_text.model"


@pytest.fixture(scope="session")
def tokenizer(file: Path) -> ChatGLM6BTokenizer:
    return ChatGLM6BTokenizer(file)


QWEN2_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN2_SHOWN = ["<tool_call>", "</tool_call>"]

QWEN2_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call></tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content | trim) }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""In the manner of Qwen2.5."""


def write_config(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture(scope="session")
def chatglm3_folder(train_file: TrainFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small `tokenizer.model` of ChatGLM2 or ChatGLM3."""
    folder = tmp_path_factory.mktemp("chatglm3")
    trained = train_file(
        control_symbols=[],
        user_defined_symbols=[],
        pad_id=-1,
        normalization_rule_name="identity",  # keeps line breaks, as the released file does
        remove_extra_whitespaces=False,
    )
    (folder / "tokenizer.model").write_bytes(trained.read_bytes())
    return folder


@pytest.fixture(scope="session")
def glm4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small `tokenizer.model` of GLM-4: the bytes, and some merges of them."""
    folder = tmp_path_factory.mktemp("glm4")
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [b"he", b"ll", "你".encode()[:2], "你".encode(), "好".encode()]
    lines = [b"%s %d\n" % (base64.b64encode(one), rank) for rank, one in enumerate(pieces)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer in the form of Qwen2.5."""
    folder = tmp_path_factory.mktemp("qwen2")
    found = Tokenizer(models.BPE())
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    found.add_special_tokens(QWEN2_SPECIAL)
    found.add_tokens([AddedToken(name, normalized=False) for name in QWEN2_SHOWN])
    found.save(str(folder / "tokenizer.json"))
    write_config(
        folder,
        tokenizer_class="Qwen2Tokenizer",
        eos_token="<|im_end|>",
        chat_template=QWEN2_TEMPLATE,
    )
    return folder


@pytest.fixture
def copied(qwen2_folder: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to change."""
    for file in qwen2_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="session")
def qwen2_older_folder(qwen2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary in Qwen2's older files."""
    folder = tmp_path_factory.mktemp("qwen2_older")
    content = json.loads((qwen2_folder / "tokenizer.json").read_text("utf-8"))
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]), "utf-8")
    # The library writes a merge as a text or as a pair, depending on its version.
    merges = "\n".join(
        one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]
    )
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    added = {one["id"]: one for one in content["added_tokens"]}
    write_config(folder, tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added)
    return folder


def golden_json(name: str) -> dict[str, Any]:
    """A small `tokenizer.json` ("tokenizer") and the ids of some texts ("cases")."""
    content: dict[str, Any] = json.loads(
        (golden_folder("tokenizer_json") / f"{name}.json").read_text("utf-8")
    )
    return content


class Family(NamedTuple):
    """A folder as it is published: whose vocabulary, and what `tokenizer_config.json` says."""

    vocabulary: str
    template: str
    eos_token: str
    bos_token: Optional[str] = None
    added: tuple[str, ...] = ()


FAMILIES = {
    "llama2": Family("llama_spm", templates.LLAMA_2, "</s>", "<s>"),
    "tiny_llama": Family("llama_spm", templates.TINY_LLAMA, "</s>", "<s>"),
    "mistral": Family("llama_spm", templates.MISTRAL, "</s>", "<s>"),
    "llama3": Family("llama_bpe", templates.LLAMA_3, "<|eot_id|>", "<|begin_of_text|>"),
    "smollm2": Family("qwen2", templates.SMOL_LM_2, "<|im_end|>", "<|im_start|>"),
    "qwen3": Family(
        *("qwen2", templates.QWEN_3, "<|im_end|>", None),
        ("<tool_call>", "</tool_call>", "<tool_response>", "<think>", "</think>"),
    ),
    "glm4_0414": Family("glm4", templates.GLM_4_0414, "<|user|>"),
}


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each of `FAMILIES`."""
    folders = {}
    for name, family in FAMILIES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        content = golden_json(family.vocabulary)["tokenizer"]
        token = content["added_tokens"][0]
        first = max(one["id"] for one in content["added_tokens"]) + 1
        content["added_tokens"] += [
            {**token, "content": one, "id": first + place, "special": False}
            for place, one in enumerate(family.added)
        ]
        (folders[name] / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        write_config(
            folders[name],
            tokenizer_class="PreTrainedTokenizerFast",
            chat_template=family.template,
            bos_token=family.bos_token and {"content": family.bos_token},
            eos_token=family.eos_token,
        )
    return folders


def _load(name: str, request: pytest.FixtureRequest) -> ChatTokenizer:
    folder: Path
    if name == "chatglm":
        return ChatGLM6BTokenizer(request.getfixturevalue("trained_file"))
    if name in ("chatglm2", "chatglm3"):
        folder = request.getfixturevalue("chatglm3_folder")
        return ChatGLM2Tokenizer.from_folder(folder, version=int(name[-1]))
    if name == "glm4":
        folder = request.getfixturevalue("glm4_folder")
        return GLM4Tokenizer.from_file(folder / "tokenizer.model")
    if name == "qwen2":
        return HuggingFaceTokenizer.from_folder(request.getfixturevalue("qwen2_folder"))
    if name in FAMILIES:
        found = load_tokenizer(request.getfixturevalue("family_folders")[name])
        assert found is not None
        return found
    if name in ("e2e_chatglm_6b", "tokenizer_chatglm_6b"):
        return ChatGLM6BTokenizer.from_folder(golden_folder(name, "ice_text.model"))
    folder = golden_folder(name, "tokenizer.model")
    if name == "tokenizer_glm4":
        return GLM4Tokenizer.from_file(folder / "tokenizer.model")
    return ChatGLM2Tokenizer.from_folder(folder)


SMALL = ["chatglm", "chatglm2", "chatglm3", "glm4", "qwen2", "llama2", "llama3", "glm4_0414"]
REFERENCE = [
    *("e2e_chatglm_6b", "tokenizer_chatglm_6b"),
    *("e2e_chatglm3_6b", "tokenizer_chatglm2_chatglm3", "tokenizer_glm4"),
]


@pytest.fixture(scope="session", params=SMALL)
def small_tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    """One family after the other, with vocabularies that are made for the tests."""
    return _load(request.param, request)


@pytest.fixture(scope="session", params=[*SMALL, *REFERENCE])
def any_tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    """One family after the other, also with the released vocabularies."""
    return _load(request.param, request)
