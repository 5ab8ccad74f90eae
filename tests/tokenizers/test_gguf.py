"""The tokenizers of GGUF files: ids that the original libraries and llama.cpp agree on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor

from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers import (
    ChatGLM2Tokenizer,
    ChatTokenizer,
    GLM4Tokenizer,
    GLM40414Tokenizer,
    HuggingFaceTokenizer,
    ToolCall,
    load_tokenizer,
)
from glm_multiuser.tokenizers.chat_template import ChatTemplate
from glm_multiuser.tokenizers.gguf import GGUFTokenizer, read_gguf_tokenizer
from glm_multiuser.tokenizers.gguf_files import write_gguf_tokenizer
from tests.checkpoint.gguf_content import Content, gguf_model
from tests.golden_data import golden_folder
from tests.tokenizers.conftest import TrainFile

MODELS = {
    "llama_bpe": "llama_bpe.F32",
    "llama_spm": "llama_spm.F16",
    "qwen2": "qwen2.F32",
    "qwen3": "qwen3.F32",
    "glm4": "glm4.F32",
    "chatglm": "chatglm.F32",
}
USER = {"role": "user", "content": "the cat"}
CHAT_ML = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


def golden(name: str) -> dict[str, Any]:
    file = golden_folder("gguf_models") / "tokenizers.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))[name]
    return found


def read(path: Path) -> GGUFTokenizer:
    found = read_gguf_tokenizer(path)
    assert found is not None
    return found


def load(path: Path) -> ChatTokenizer:
    found = load_tokenizer(path)
    assert found is not None
    return found


def parsed_ids(tokenizer: GGUFTokenizer, text: str) -> list[int]:
    """Of a text that a chat template writes: names in it are special tokens."""
    vocabulary = replace(tokenizer.vocabulary, begin_id=None)
    template = ChatTemplate("{{ the_text }}", constants={"the_text": text})
    return HuggingFaceTokenizer(vocabulary, template, (0,)).encode_messages([USER])


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_texts(name: str) -> None:
    path = gguf_model(MODELS[name])
    tokenizer, parts = load(path), read(path)
    cases = golden(name)["cases"]
    for case in cases:
        text = case["text"]
        assert tokenizer.encode(text) == case["raw_ids"], text
        assert parsed_ids(parts, text) == case["ids"], text
        if "decoded" in case:
            assert tokenizer.decode(case["raw_ids"]) == case["decoded"]
    assert len(cases) == 171


@pytest.mark.parametrize(
    ("name", "kind", "stops"),
    [
        ("llama_bpe", HuggingFaceTokenizer, ["<|end_of_text|>", "<|eot_id|>"]),
        ("llama_spm", HuggingFaceTokenizer, ["</s>"]),
        ("qwen2", HuggingFaceTokenizer, ["<|im_end|>", "<|endoftext|>"]),
        ("glm4", GLM4Tokenizer, ["<|endoftext|>", "<|user|>", "<|observation|>"]),
        ("chatglm", GLM4Tokenizer, ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    ],
)
def test_kinds_and_ends(name: str, kind: type, stops: list[str]) -> None:
    tokenizer = load(gguf_model(MODELS[name]))
    assert type(tokenizer) is kind
    assert set(tokenizer.stop_token_ids) == {tokenizer.special[one] for one in stops}


def test_every_usual_end_is_one(tmp_path: Path) -> None:
    """Whatever the file names: instruction-tuned Llama 3 names only `<|eot_id|>`."""
    content = Content.of(gguf_model("llama_bpe.F32"))
    names = content.metadata["tokenizer.ggml.tokens"]
    content.metadata["tokenizer.ggml.eos_token_id"] = names.index("<|eot_id|>")
    names[names.index("<|start_header_id|>")] = "<|eom_id|>"
    tokenizer = load(content.write(tmp_path / "a.gguf"))
    ends = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    assert set(tokenizer.stop_token_ids) == {names.index(one) for one in ends}


class TestPrompts:
    def test_the_template_of_the_file(self) -> None:
        path = gguf_model("qwen2.F32")
        assert load(path).encode_messages([USER]) == parsed_ids(read(path), CHAT_ML)

    @pytest.mark.parametrize(
        ("template", "begins"),
        [
            ("{{ messages[0].content }}", True),
            ("{{ bos_token + messages[0].content }}", True),
            ("{{ bos_token + messages[0].content }}", None),
        ],
    )
    def test_the_beginning_stands_there_once(
        self, tmp_path: Path, template: str, begins: Any
    ) -> None:
        content = Content.of(gguf_model("llama_spm.F16"))
        content.metadata["tokenizer.chat_template"] = template
        content.metadata["tokenizer.ggml.add_bos_token"] = begins
        if begins is None:  # then the kind of the vocabulary says so
            del content.metadata["tokenizer.ggml.add_bos_token"]
        tokenizer = load(content.write(tmp_path / "a.gguf"))
        assert tokenizer.encode_messages([USER]) == [1, *tokenizer.encode("the cat")]

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages[0].content }}",
            "{{ bos_token + messages[0].content }}",
            "<s>{{ messages[0].content }}",
            "{% set role = messages[0].role %}<s>{{ messages[0].content }}",
            "{% if not tools %}{{ raise_exception('') }}{% endif %}{{ messages[0].content }}",
            "<s>{% if not tools %}{{ raise_exception('') }}{% endif %}{{ messages[0].content }}",
        ],
    )
    @pytest.mark.parametrize("spaced", [True, False])
    def test_a_folder_made_of_the_file(self, tmp_path: Path, template: str, spaced: bool) -> None:
        content = Content.of(gguf_model("llama_spm.F16"))
        template += "{% if tools %}<tool_call>{% endif %}"
        content.metadata["tokenizer.chat_template"] = template
        content.metadata["tokenizer.ggml.add_space_prefix"] = spaced
        path = content.write(tmp_path / "a.gguf")
        write_gguf_tokenizer(path, tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
        assert config["add_prefix_space"] is spaced
        path = path.rename(tmp_path.with_suffix(".gguf"))
        tools = [{"type": "function", "function": {"name": "fox"}}]
        of_file, of_folder = (load(one).encode_messages([USER], tools) for one in (path, tmp_path))
        assert of_folder == of_file
        assert of_folder.count(1) == 1

    def test_no_beginning(self, tmp_path: Path) -> None:
        content = Content.of(gguf_model("llama_spm.F16"))
        content.metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
        content.metadata["tokenizer.ggml.add_bos_token"] = False
        tokenizer = load(content.write(tmp_path / "a.gguf"))
        assert tokenizer.encode_messages([USER]) == tokenizer.encode("the cat")

    def test_of_glm4(self) -> None:
        tokenizer = load(gguf_model("glm4.F32"))
        head = [tokenizer.special[one] for one in ("[gMASK]", "<sop>", "<|user|>")]
        content = [*tokenizer.encode("\n"), *tokenizer.encode("the cat")]
        assistant = tokenizer.special["<|assistant|>"]
        assert tokenizer.encode_messages([USER]) == [*head, *content, assistant]

    def test_a_template_with_tools_is_that_of_glm4_0414(self, tmp_path: Path) -> None:
        content = Content.of(gguf_model("glm4.F32"))
        content.metadata["tokenizer.chat_template"] = "[gMASK]<sop>{% if tools %}#{% endif %}"
        assert type(load(content.write(tmp_path / "a.gguf"))) is GLM40414Tokenizer

    def test_of_several_templates_one_is_for_tools(self, tmp_path: Path) -> None:
        """Also where the files of a folder are made of the file."""
        content = Content.of(gguf_model("llama_spm.F16"))
        source = "{{ tools[0].function.name }}<tool_call>"
        content.metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
        content.metadata["tokenizer.chat_template.tool_use"] = source
        path = content.write(tmp_path / "a.gguf")
        write_gguf_tokenizer(path, tmp_path)
        path = path.rename(tmp_path.with_suffix(".gguf"))
        for place in (path, tmp_path):
            tokenizer = load(place)
            tools = [{"type": "function", "function": {"name": "fox"}}]
            assert tokenizer.encode_messages([USER]) == [1, *tokenizer.encode("the cat")]
            assert tokenizer.encode_messages([USER], tools) == [
                1,
                *tokenizer.encode("fox<tool_call>"),
            ]


def test_chatglm3(tmp_path: Path, train_file: TrainFile) -> None:
    """As llama.cpp converts it. Also where the files of a folder are made of the file."""
    file = train_file(
        model_type="bpe",
        control_symbols=[],
        user_defined_symbols=[],
        pad_id=-1,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    original, pieces = ChatGLM2Tokenizer(file), SentencePieceProcessor(model_file=str(file))
    ids = range(pieces.get_piece_size())
    kinds = [2, 3, 3, *(6 if pieces.is_byte(one) else 1 for one in ids[3:])]
    names = ["<unk>", "<bos>", "<eos>", *map(pieces.id_to_piece, ids[3:])]
    special = list(original.special)
    template = "[gMASK]sop<|{{ messages[0].role }}|>\n {{ messages[0].content }}<|assistant|>"
    content = Content.of(gguf_model("llama_spm.F16"))
    content.metadata.update(
        {
            "tokenizer.ggml.tokens": [*names, *special],
            "tokenizer.ggml.token_type": np.array([*kinds, *(3 for _ in special)], "<i4"),
            "tokenizer.ggml.scores": np.array(
                [*map(pieces.get_score, ids), *(0 for _ in special)], "<f4"
            ),
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": template,
        }
    )
    path = content.write(tmp_path / "a.gguf")
    write_gguf_tokenizer(path, tmp_path)
    path = path.rename(tmp_path.with_suffix(".gguf"))
    tools = [{"type": "function", "function": {"name": "fox"}}]
    for place in (path, tmp_path):
        tokenizer = load(place)
        assert set(tokenizer.stop_token_ids) == set(original.stop_token_ids)
        for offered in ((), tools):
            expected = original.encode_messages([USER], offered)
            assert tokenizer.encode_messages([USER], offered) == expected
        answer = tokenizer.decode(original.encode("\n") + original.encode("the cat"))
        assert tokenizer.answer_reader().feed(answer) == "the cat"
        reader = tokenizer.answer_reader(tools)
        reader.feed("fox\n```python\ntool_call(a=1)\n```")
        assert reader.finish().tool_calls == (ToolCall("fox", '{"a": 1}'),)


def with_user_defined(
    name: str, token_id: int, folder: Path, kind: int = 4, **ids: int
) -> ChatTokenizer:
    content = Content.of(gguf_model(name))
    types = content.metadata["tokenizer.ggml.token_type"].copy()
    types[token_id] = kind
    content.metadata.update({f"tokenizer.ggml.{key}": one for key, one in ids.items()})
    content.metadata["tokenizer.ggml.token_type"] = types
    return load(content.write(folder / "a.gguf"))


@pytest.mark.parametrize(
    ("name", "token_id", "piece"), [("llama_spm.F16", 290, "▁we"), ("qwen2.F32", 296, "'s")]
)
def test_user_defined_tokens_are_shown_and_never_written(
    tmp_path: Path, name: str, token_id: int, piece: str
) -> None:
    tokenizer = with_user_defined(name, token_id, tmp_path)
    assert tokenizer.special[piece] == token_id
    assert tokenizer.decode([token_id]) == piece
    text = piece.replace("▁", " ")
    assert token_id in load(gguf_model(name)).encode(text)
    assert token_id not in tokenizer.encode(text)


@pytest.mark.parametrize(
    ("name", "token_id", "word"), [("qwen2.F32", 290, "ere"), ("llama_spm.F16", 324, "ong")]
)
def test_user_defined_words_are_text(tmp_path: Path, name: str, token_id: int, word: str) -> None:
    """As in llama.cpp."""
    tokenizer = with_user_defined(name, token_id, tmp_path)
    assert word not in tokenizer.special
    assert tokenizer.encode(f"to{word}d") == [
        *tokenizer.encode("to"),
        token_id,
        *tokenizer.encode("d"),
    ]
    assert tokenizer.decode([token_id]) == word


def test_padding_may_be_an_ordinary_piece(tmp_path: Path) -> None:
    before, piece = load(gguf_model("qwen2.F32")), "th"
    (token_id,) = before.encode(piece)
    found = with_user_defined("qwen2.F32", token_id, tmp_path, 3, padding_token_id=token_id)
    assert found.encode("the other") == before.encode("the other")
    assert found.special == before.special
    with pytest.raises(CheckpointError, match="'th' as ordinary text"):
        with_user_defined("qwen2.F32", token_id, tmp_path, 3, eos_token_id=token_id)


@pytest.mark.parametrize("kind", [2, 5])
def test_padding_may_be_unknown_pieces(tmp_path: Path, kind: int) -> None:
    content = Content.of(gguf_model("llama_spm.F16"))
    types = content.metadata["tokenizer.ggml.token_type"].copy()
    types[290] = kind  # "▁we"
    content.metadata["tokenizer.ggml.token_type"] = types
    tokenizer, original = (
        load(content.write(tmp_path / "a.gguf")),
        load(gguf_model("llama_spm.F16")),
    )
    assert 290 in original.encode("we")
    assert 290 not in tokenizer.encode("we")
    assert tokenizer.encode("\u4f60 the cat 12") == original.encode("\u4f60 the cat 12")


CONVERTED = {
    "without ids": ("bos_token_id", None),
    "without bos": ("eos_token_id", 2),
    "padding of -1": ("padding_token_id", (1 << 32) - 1),
    "unknown of -1": ("unknown_token_id", -1),
}


@pytest.mark.parametrize("what", CONVERTED)
def test_ids_that_a_converter_leaves_out(tmp_path: Path, what: str) -> None:
    """`llama` has the usual ones then, as in llama.cpp."""
    content = Content.of(gguf_model("llama_spm.F16"))
    content.metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    original = content.write(tmp_path / "original.gguf")
    key, value = CONVERTED[what]
    for one in ("bos_token_id", "eos_token_id"):
        if what.startswith("without"):
            del content.metadata[f"tokenizer.ggml.{one}"]
    if value is not None:
        content.metadata[f"tokenizer.ggml.{key}"] = value
    path = content.write(tmp_path / "a.gguf")
    assert load(path).encode_messages([USER]) == load(original).encode_messages([USER])
    assert load(path).stop_token_ids == load(original).stop_token_ids
    assert read_model_config(path) == read_model_config(original)
    write_gguf_tokenizer(path, tmp_path)


@pytest.mark.parametrize("kind", [1, 3])
def test_a_vocabulary_without_an_unknown_piece(tmp_path: Path, kind: int) -> None:
    content = Content.of(gguf_model("llama_spm.F16"))
    types = content.metadata["tokenizer.ggml.token_type"].copy()
    assert types[0] == 2
    types[0] = kind
    content.metadata["tokenizer.ggml.token_type"] = types
    content.metadata.pop("tokenizer.ggml.unknown_token_id", None)
    tokenizer = load(content.write(tmp_path / "a.gguf"))
    text = "the cat 12 \u4f60"
    assert tokenizer.encode(text) == load(gguf_model("llama_spm.F16")).encode(text)


@pytest.mark.parametrize("name", ["llama_spm.F16", "qwen2.F32"])
def test_a_piece_without_a_name(tmp_path: Path, name: str) -> None:
    content = Content.of(gguf_model(name))
    types = content.metadata["tokenizer.ggml.token_type"].copy()
    types[-1], content.metadata["tokenizer.ggml.tokens"][-1] = 3, ""
    content.metadata["tokenizer.ggml.token_type"] = types
    tokenizer = load(content.write(tmp_path / "a.gguf"))
    assert tokenizer.encode("the cat") == load(gguf_model(name)).encode("the cat")


def test_an_end_of_a_turn_is_special_whatever_its_type(tmp_path: Path) -> None:
    content, original = Content.of(gguf_model("qwen2.F32")), load(gguf_model("qwen2.F32"))
    types = content.metadata["tokenizer.ggml.token_type"].copy()
    types[content.metadata["tokenizer.ggml.tokens"].index("<|im_end|>")] = 1
    content.metadata["tokenizer.ggml.token_type"] = types
    tokenizer = load(content.write(tmp_path / "a.gguf"))
    assert tokenizer.encode_messages([USER]) == original.encode_messages([USER])
    assert tokenizer.stop_token_ids == original.stop_token_ids


@pytest.mark.parametrize("model", ["none", "no_vocab"])
def test_no_vocabulary(tmp_path: Path, model: str) -> None:
    content = Content.of(gguf_model("qwen2.F32"))
    content.metadata["tokenizer.ggml.model"] = model
    assert load_tokenizer(content.write(tmp_path / "a.gguf")) is None


Change = Callable[[dict[str, Any]], object]


def setting(key: str, value: Any) -> Change:
    return lambda metadata: metadata.__setitem__(f"tokenizer.{key}", value)


def scores(count: int, value: float) -> Change:
    return setting("ggml.scores", np.full(count, value, "<f4"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2.F32", setting("ggml.model", "bert"), "model .* is 'bert'; .*'gpt2', 'llama'"),
        ("qwen2.F32", setting("ggml.pre", "tekken"), "pre .* is 'tekken'; .*'llama-bpe'"),
        ("qwen2.F32", setting("ggml.tokens", 7), r"no tokenizer\.ggml\.tokens of strings"),
        ("qwen2.F32", setting("ggml.merges", 7), r"no tokenizer\.ggml\.merges of strings"),
        ("qwen2.F32", setting("ggml.merges", ["t"]), "cannot be read by tokenizers|not a BPE"),
        ("qwen2.F32", setting("ggml.merges", ["t q"]), "cannot be read by tokenizers"),
        ("qwen2.F32", setting("ggml.token_type", np.ones(3, "<i4")), "has 3 entries; .* has 320"),
        ("qwen2.F32", setting("ggml.token_type", 1), "token_type of whole numbers"),
        ("qwen2.F32", setting("ggml.token_type", np.full(320, 7, "<i4")), "are not 1 to 6"),
        ("qwen2.F32", setting("ggml.eot_token_id", 320), "is 320; it must be an id below 320"),
        ("qwen2.F32", setting("chat_template", 7), "chat_template of .* is int, not a string"),
        ("qwen2.F32", setting("chat_template", "{% for"), "chat_template of .* is not Jinja2"),
        ("llama_spm.F16", scores(3, 0.0), "scores of .* has 3 entries; .* has 384"),
        ("llama_spm.F16", scores(384, np.nan), "scores of finite numbers"),
        (
            "llama_spm.F16",
            lambda metadata: metadata["tokenizer.ggml.tokens"].__setitem__(300, "<s>"),
            "is not a sentencepiece model",
        ),
    ],
)
def test_broken_vocabularies(tmp_path: Path, name: str, change: Change, message: str) -> None:
    content = Content.of(gguf_model(name))
    change(content.metadata)
    path = content.write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(path)
