"""Llama, Mistral, SmolLM2, Qwen3 and GLM-4-0414: folders as published, with small vocabularies.

The ids of texts are recorded in `tests/golden/tokenizer_json`; prompts are compared with what
Jinja2 and the library tokenizers make of the same files.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from glm_multiuser.errors import CheckpointError, InvalidParameterError
from glm_multiuser.tokenizers import (
    ChatTokenizer,
    GLM4Tokenizer,
    GLM40414Tokenizer,
    HuggingFaceTokenizer,
    ToolCall,
    load_tokenizer,
)
from glm_multiuser.tokenizers.tokenizer_json import vocabulary_of
from tests.tokenizers.conftest import FAMILIES, TrainFile, golden_json, write_config

USER = {"role": "user", "content": "the cat"}
CONVERSATION = [
    USER,
    {"role": "assistant", "content": "  It's 中文 \n\n42"},
    {"role": "user", "content": "\n  and <then>?"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "天气"}}]
CONTINUED = Path(__file__).parent / "continued.json"
CALL = {"function": {"name": "f", "arguments": '{"city": "北京"}'}}


def load(folder: Path) -> ChatTokenizer:
    found = load_tokenizer(folder)
    assert found is not None
    return found


def write_tokenizer(folder: Path, content: dict[str, Any], **config: Any) -> ChatTokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    write_config(folder, eos_token="</s>", **config)
    return load(folder)


def rendered(name: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None, ensure_ascii=False: json.dumps(
        value, indent=indent, ensure_ascii=ensure_ascii
    )
    return environment.from_string(FAMILIES[name].template).render(
        messages=messages,
        tools=tools,
        add_generation_prompt=True,
        bos_token=FAMILIES[name].bos_token or "",
        eos_token=FAMILIES[name].eos_token,
        strftime_now=datetime.now().strftime,
    )


def ids_of_the_library(folder: Path, text: str) -> list[int]:
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", ["llama_bpe", "llama_spm", "qwen2", "glm4"])
def test_ids_and_texts_of_the_golden_files(name: str) -> None:
    golden = golden_json(name)
    tokenizer = HuggingFaceTokenizer(vocabulary_of(golden["tokenizer"], Path(name)), None, (0,))
    decoded = 0
    for one in golden["cases"]:
        assert tokenizer.encode(one["text"]) == one["raw_ids"], one["text"]
        if "decoded" in one:
            decoded += 1
            assert tokenizer.decode(one["raw_ids"]) == one["decoded"]
    assert (len(golden["cases"]), decoded > 150) == (171, True)


class TestPrompts:
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("length", [1, 3])
    def test_ids_are_those_of_the_rendered_text(
        self, family_folders: dict[str, Path], name: str, length: int
    ) -> None:
        messages = CONVERSATION[:length]
        tokenizer = load(family_folders[name])
        expected = ids_of_the_library(family_folders[name], rendered(name, messages))
        assert tokenizer.encode_messages(messages) == expected
        history = [(messages[0]["content"], messages[1]["content"])] if length > 1 else []
        assert tokenizer.encode_prompt(messages[-1]["content"], history) == expected

    @pytest.mark.parametrize("name", [one for one in FAMILIES if one != "mistral"])
    def test_a_system_message(self, family_folders: dict[str, Path], name: str) -> None:
        expected = ids_of_the_library(family_folders[name], rendered(name, [SYSTEM, USER]))
        assert load(family_folders[name]).encode_messages([SYSTEM, USER]) == expected

    def test_a_template_refuses_a_system_message(self, family_folders: dict[str, Path]) -> None:
        with pytest.raises(InvalidParameterError, match="Only user and assistant roles"):
            load(family_folders["mistral"]).encode_messages([SYSTEM, USER])

    @pytest.mark.parametrize(
        ("name", "beginning"),
        [
            ("llama2", ["<s>", "▁"]),
            ("llama3", ["<|begin_of_text|>", "<|start_header_id|>"]),
            ("glm4_0414", ["[gMASK]", "<sop>", "<|user|>"]),
        ],
    )
    def test_the_beginning_stands_once_and_in_prompts_only(
        self, family_folders: dict[str, Path], name: str, beginning: list[str]
    ) -> None:
        tokenizer = load(family_folders[name])
        ids = tokenizer.encode_prompt("the cat")
        library = Tokenizer.from_file(str(family_folders[name] / "tokenizer.json"))
        first = [library.token_to_id(one) for one in beginning]
        assert ids[: len(first)] == first
        assert ids.count(first[0]) == 1
        assert first[0] not in tokenizer.encode("the cat")

    def test_a_prompt_of_glm4(self, family_folders: dict[str, Path]) -> None:
        messages = [SYSTEM, *CONVERSATION]
        text = rendered("glm4_0414", messages)
        assert text == (
            "[gMASK]<sop><|system|>\nBe brief.<|user|>\nthe cat<|assistant|>\n  It's 中文 \n\n42"
            "<|user|>\n\n  and <then>?<|assistant|>"
        )
        assert load(family_folders["glm4_0414"]).encode_messages(messages) == ids_of_the_library(
            family_folders["glm4_0414"], text
        )

    @pytest.mark.parametrize("name", FAMILIES)
    def test_the_beginning_of_an_answer(self, family_folders: dict[str, Path], name: str) -> None:
        """As transformers renders it with `continue_final_message`."""
        recorded = json.loads(CONTINUED.read_text("utf-8"))["cases"]
        cases = [one for one in recorded if one["family"] == name]
        assert len(cases) == 7
        tokenizer = load(family_folders[name])
        for one in cases:
            ids = tokenizer.encode_messages(one["messages"], continue_final_message=True)
            assert ids == ids_of_the_library(family_folders[name], one["rendered"]), one

    def test_thoughts_of_earlier_answers(self, family_folders: dict[str, Path]) -> None:
        answer = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nfine"}
        tokenizer = load(family_folders["qwen3"])
        plain = [USER, {**answer, "content": "fine"}, USER]
        assert tokenizer.encode_messages([USER, answer, USER]) == tokenizer.encode_messages(plain)
        ids = tokenizer.encode_prompt("<think>")
        assert ids_of_the_library(family_folders["qwen3"], "<think>")[0] not in ids


class TestTools:
    CALLED = ({"role": "assistant", "content": None, "tool_calls": [CALL]},)
    RESULT = ({"role": "tool", "content": "22"},)

    def test_of_qwen3(self, family_folders: dict[str, Path]) -> None:
        tokenizer = load(family_folders["qwen3"])
        function = {"name": "f", "arguments": {"city": "北京"}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        text = rendered("qwen3", [USER, call, *self.RESULT], TOOLS)
        assert '<tool_call>\n{"name": "f", "arguments": {"city": "北京"}}\n</tool_call>' in text
        expected = ids_of_the_library(family_folders["qwen3"], text)
        assert tokenizer.encode_messages([USER, *self.CALLED, *self.RESULT], TOOLS) == expected

    @pytest.mark.parametrize("name", ["qwen3", "glm4_0414"])
    def test_a_call_without_arguments(self, family_folders: dict[str, Path], name: str) -> None:
        tokenizer = load(family_folders[name])
        calls = [{"name": "f", "arguments": arguments} for arguments in ("", "{}")]
        empty, object_of_none = (
            tokenizer.encode_messages(
                [USER, {**self.CALLED[0], "tool_calls": [{"function": call}]}, *self.RESULT], TOOLS
            )
            for call in calls
        )
        assert empty == object_of_none

    @pytest.mark.parametrize("words", ["", "wait"])
    def test_of_glm4_0414(self, family_folders: dict[str, Path], words: str) -> None:
        tokenizer = load(family_folders["glm4_0414"])
        call = {**self.CALLED[0], "content": words}
        ids = tokenizer.encode_messages([USER, call, *self.RESULT], TOOLS)
        text = rendered("glm4_0414", [USER], TOOLS)
        text += f"\n{words}<|assistant|>" if words else ""
        text += 'f\n{"city": "北京"}<|observation|>\n22<|assistant|>'
        assert ids == ids_of_the_library(family_folders["glm4_0414"], text)
        reader = tokenizer.answer_reader(TOOLS)
        assert reader.feed(f'\n{words}<|assistant|>f\n{{"a": 1}}') == words
        assert reader.finish().tool_calls == (ToolCall("f", '{"a": 1}'),)

    def test_calls_in_a_form_that_is_not_read(self, family_folders: dict[str, Path]) -> None:
        tokenizer = load(family_folders["llama3"])
        with pytest.raises(
            InvalidParameterError, match=r"tools is .*does not mention.*<tool_call>"
        ):
            tokenizer.encode_messages([USER], TOOLS)
        with pytest.raises(InvalidParameterError, match=r"messages\[1\] has tool_calls"):
            tokenizer.encode_messages([USER, *self.CALLED, *self.RESULT])


class TestAnswers:
    def test_of_glm4_0414_have_no_metadata_line(self, family_folders: dict[str, Path]) -> None:
        tokenizer = load(family_folders["glm4_0414"])
        assert isinstance(tokenizer, GLM40414Tokenizer)
        answer = tokenizer.decode(tokenizer.encode("\nfine"))
        assert (answer, tokenizer.process_response(answer)) == ("\nfine", "fine")
        assert tokenizer.answer_reader().feed(answer) == "fine"

    def test_of_llama_2_lose_one_space(self, family_folders: dict[str, Path]) -> None:
        tokenizer = load(family_folders["llama2"])
        ids = tokenizer.encode("  the cat")
        assert tokenizer.decode(ids) == "  the cat"
        assert b"".join(map(tokenizer.token_bytes, ids)) == b"   the cat"
        assert tokenizer.decode([1, *ids, 2, 2]) == "  the cat"

    def test_bytes_that_are_no_utf8(self, family_folders: dict[str, Path]) -> None:
        tokenizer = load(family_folders["llama2"])
        bad = [3 + byte for byte in b"\xe4\xbd"]
        assert tokenizer.decode([*bad, 3 + ord("a")]) == "\ufffd\ufffda"

    @pytest.mark.parametrize(
        ("name", "ends"),
        [
            ("llama2", ["</s>"]),
            ("llama3", ["<|eot_id|>", "<|end_of_text|>"]),
            ("qwen3", ["<|im_end|>", "<|endoftext|>"]),
            ("glm4_0414", ["<|user|>", "<|endoftext|>", "<|observation|>"]),
        ],
    )
    def test_ends(self, family_folders: dict[str, Path], name: str, ends: list[str]) -> None:
        library = Tokenizer.from_file(str(family_folders[name] / "tokenizer.json"))
        stops = load(family_folders[name]).stop_token_ids
        assert stops == tuple(library.token_to_id(end) for end in ends)

    def test_several_ends_of_the_generation_config(
        self, family_folders: dict[str, Path], tmp_path: Path
    ) -> None:
        for file in family_folders["llama3"].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [301, 303, 304]}')
        assert load(tmp_path).stop_token_ids == (304, 301, 303)


class TestBaseModels:
    def test_there_is_no_prompt_without_a_template(self, tmp_path: Path) -> None:
        tokenizer = write_tokenizer(tmp_path, golden_json("llama_spm")["tokenizer"])
        assert tokenizer.encode("the cat") == [261, 338]
        assert tokenizer.answer_reader().feed("fine") == "fine"
        with pytest.raises(InvalidParameterError, match=r"no chat template.*token ids"):
            tokenizer.encode_messages([USER])
        with pytest.raises(InvalidParameterError, match=r"no chat template.*token ids"):
            tokenizer.encode_prompt("the cat")
        with pytest.raises(InvalidParameterError, match=r"tools is .*must be empty"):
            tokenizer.answer_reader(TOOLS)

    def test_glm4_without_a_template_has_its_own_form(self, tmp_path: Path) -> None:
        tokenizer = write_tokenizer(tmp_path, golden_json("glm4")["tokenizer"])
        assert isinstance(tokenizer, GLM4Tokenizer)
        text = "[gMASK]<sop><|user|>\nthe cat<|assistant|>"
        assert tokenizer.encode_messages([USER]) == ids_of_the_library(tmp_path, text)


class TestVocabulary:
    def test_whole_words_are_not_merged(self) -> None:
        content = golden_json("llama_bpe")["tokenizer"]
        content["model"]["vocab"]["zzz"] = 400
        for ignore_merges, expected in [(True, [400]), (False, [89, 89, 89])]:
            content["model"]["ignore_merges"] = ignore_merges
            assert vocabulary_of(content, Path("a")).encode("zzz") == expected

    @pytest.mark.parametrize(
        ("scheme", "text", "pieces", "behind"),
        [
            *(("first", "", "", ""), ("first", " ", "▁", "▁"), ("first", "a", "▁a", "a")),
            *(("first", " a", "▁a", "▁a"), ("first", "  a", "▁▁ a", "▁▁ a")),
            *(("always", "a", "▁a", "▁a"), ("always", "  a", "▁▁ a", "▁▁ a")),
            *(("never", "a", "a", "a"), ("never", " a", "▁a", "▁a")),
        ],
    )
    def test_metaspace(
        self, tmp_path: Path, scheme: str, text: str, pieces: str, behind: str
    ) -> None:
        content = golden_json("llama_spm")["tokenizer"]
        known = {**content["model"]["vocab"], "▁": 400, "a": 401, "▁▁": 402, "▁a": 403}
        content["model"].update(vocab=known, merges=["▁ ▁", "▁ a"])
        content["normalizer"] = None
        content["pre_tokenizer"] = {
            **{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme},
            "split": False,
        }
        template = "{{ messages[0].content }}<s>{{ messages[0].content }}"
        tokenizer = write_tokenizer(tmp_path, content, chat_template=template)
        expected = [known[piece] for piece in pieces.split()]
        assert tokenizer.encode(text) == expected
        assert tokenizer.encode_prompt(text) == [
            *expected,
            known["<s>"],
            *(known[piece] for piece in behind.split()),
        ]

    @pytest.mark.parametrize(
        ("scheme", "text", "pieces", "behind"),
        [
            ("first", "aC++a C++ a", "▁a C++ a ▁ C++ ▁a", "a C++ a ▁ C++ ▁a"),
            ("first", "C++a", "C++ a", "C++ a"),
            ("always", "aC++a C++ a", "▁a C++ ▁a ▁ C++ ▁a", "▁a C++ ▁a ▁ C++ ▁a"),
            ("never", "aC++a C++ a", "a C++ a ▁ C++ ▁a", "a C++ a ▁ C++ ▁a"),
        ],
    )
    def test_words_between_metaspace(
        self, scheme: str, text: str, pieces: str, behind: str
    ) -> None:
        # By tokenizers 0.22.
        content = golden_json("llama_spm")["tokenizer"]
        known = {**content["model"]["vocab"], "▁": 400, "a": 401, "▁a": 403}
        content["model"].update(vocab=known, merges=["▁ a"])
        content["normalizer"] = None
        content["pre_tokenizer"] = {
            **{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme},
            "split": False,
        }
        content["added_tokens"].append({"content": "C++", "id": 404, "normalized": True})
        found = vocabulary_of(content, Path("a"))
        known["C++"] = 404
        assert found.encode(text) == [known[piece] for piece in pieces.split()]
        later = found.encode_after_special or found.encode
        assert later(text) == [known[piece] for piece in behind.split()]
        assert "C++" not in found.special

    def test_another_normalizer(self) -> None:
        content = golden_json("llama_spm")["tokenizer"]
        content["normalizer"]["normalizers"].append({"type": "NFC"})
        encode = vocabulary_of(content, Path("a")).encode
        assert encode("cafe\u0301 a") == encode("caf\u00e9 a")

    @pytest.mark.slow
    def test_a_long_text(self) -> None:
        encode = vocabulary_of(golden_json("llama_spm")["tokenizer"], Path("a")).encode
        assert len(encode(" " * 1_000_000)) == 1_000_001

    @pytest.mark.parametrize(
        "normalizer",
        [
            True,
            {"type": "Sequence", "normalizers": 5},
            {"type": "Sequence", "normalizers": [7]},
            {"type": "Prepend", "prepend": {}},
            {"type": "Replace", "pattern": {"String": " "}},
            {"type": "Replace", "pattern": {"String": None}, "content": "a"},
            {"type": "Replace", "pattern": {"String": [" "]}, "content": ["a"]},
        ],
    )
    def test_a_broken_normalizer(self, normalizer: Any) -> None:
        content = golden_json("llama_spm")["tokenizer"]
        content["normalizer"] = normalizer
        with pytest.raises(CheckpointError, match=r"a\.json cannot be read by tokenizers"):
            vocabulary_of(content, Path("a.json"))

    @pytest.mark.parametrize("kind", ["added token", "piece"])
    def test_half_of_a_surrogate_pair(self, kind: str) -> None:
        content = golden_json("llama_spm")["tokenizer"]
        if kind == "piece":
            content["model"]["vocab"]["\ud800"] = 999
        else:
            content["added_tokens"].append({"content": "\ud800", "id": 999, "special": True})
        with pytest.raises(CheckpointError, match=r"a\.json (has an|cannot be read)"):
            vocabulary_of(content, Path("a.json"))

    @pytest.mark.parametrize(
        "pre_tokenizer", [{"type": "Metaspace", "split": True}, {"type": "Digits"}, "x"]
    )
    def test_another_pre_tokenizer(self, pre_tokenizer: Any) -> None:
        content = golden_json("llama_spm")["tokenizer"]
        content["pre_tokenizer"] = pre_tokenizer
        with pytest.raises(CheckpointError, match=r"a\.json has pre_tokenizer"):
            vocabulary_of(content, Path("a.json"))

    def test_a_byte_without_a_piece(self) -> None:
        content = golden_json("llama_spm")["tokenizer"]
        del content["model"]["vocab"]["<0x41>"]
        with pytest.raises(CheckpointError, match=r"a\.json has no piece '<0x41>'"):
            vocabulary_of(content, Path("a.json"))

    def test_an_unknown_character_is_no_special_token(self) -> None:
        content = golden_json("llama_bpe")["tokenizer"]
        del content["model"]["vocab"]["z"]
        content["model"]["unk_token"] = "a"
        assert vocabulary_of(content, Path("a")).encode("z") == []

    def test_a_special_token_that_merges_make(self) -> None:
        content = golden_json("llama_spm")["tokenizer"]
        model = content["model"]
        model["vocab"].update({"s>": 400, "<": 401, "s": 402, ">": 403})
        model["merges"] = [*model["merges"], "s >", "< s>"]
        vocabulary = vocabulary_of(content, Path("a"))
        assert vocabulary.encode("a<s>")[-2:] == [401, 400]


@pytest.fixture(scope="module")
def llama_file(train_file: TrainFile) -> Path:
    return train_file(
        control_symbols=[],
        user_defined_symbols=[],
        pad_id=-1,
        model_type="bpe",
        vocab_size=300,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )


class TestSentencePieceFile:
    @pytest.fixture
    def folder(self, llama_file: Path, tmp_path: Path) -> Path:
        (tmp_path / "tokenizer.model").write_bytes(llama_file.read_bytes())
        return tmp_path

    @pytest.mark.parametrize("legacy", [None, True, False])
    def test_a_prompt(self, folder: Path, legacy: Any) -> None:
        processor: Any = sentencepiece.SentencePieceProcessor(
            model_file=str(folder / "tokenizer.model")
        )
        write_config(
            folder,
            **{"tokenizer_class": "LlamaTokenizer", "chat_template": FAMILIES["mistral"].template},
            **{"bos_token": "<s>", "eos_token": "</s>"},
            **({} if legacy is None else {"legacy": legacy}),
        )
        tokenizer = load(folder)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert tokenizer.encode("the fox</s>") == processor.encode("the fox</s>")
        assert tokenizer.decode(processor.encode("the fox\n")) == "the fox\n"
        bos, *ids = tokenizer.encode_prompt("the fox</s>")
        assert bos == processor.bos_id()
        text = b"".join(map(tokenizer.token_bytes, ids))
        assert text == (b"" if legacy is False else b" ") + b"[INST] the fox</s> [/INST]"
        assert tokenizer.stop_token_ids == (processor.eos_id(),)

    @pytest.mark.parametrize("legacy", [True, False])
    def test_no_space_before_a_text(self, folder: Path, legacy: bool) -> None:
        processor: Any = sentencepiece.SentencePieceProcessor(
            model_file=str(folder / "tokenizer.model")
        )
        write_config(
            folder,
            **{"tokenizer_class": "LlamaTokenizer", "chat_template": FAMILIES["mistral"].template},
            **{"bos_token": "<s>", "eos_token": "</s>"},
            **{"legacy": legacy, "add_prefix_space": False},
            added_tokens_decoder={"900": {"content": "C++"}},
        )
        tokenizer = load(folder)
        # The processor prepends a space.
        fox = processor.encode("the fox")
        assert tokenizer.encode(" the fox") == fox
        assert tokenizer.encode("C++ the fox") == [900, *fox]
        _, *ids = tokenizer.encode_prompt("the fox")
        assert tokenizer.decode(ids) == "[INST] the fox [/INST]"
        for text in ("the fox", " the fox", "C++the fox"):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_added_tokens(self, folder: Path) -> None:
        added = {"900": {"content": "<|im_start|>", "special": True}, "901": {"content": "<x>"}}
        write_config(
            folder,
            **{"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>"},
            added_tokens_decoder={**added, "902": {"content": "<|im_end|>", "special": True}},
        )
        tokenizer = load(folder)
        ids = tokenizer.encode_prompt("<|im_end|>")
        assert [one for one in ids if one >= 900] == [900, 902, 900]
        assert tokenizer.decode([901, 902]) == "<x>"
        assert tokenizer.stop_token_ids == (902,)

    def test_added_tokens_of_the_older_file(self, folder: Path) -> None:
        added = {"<|im_start|>": 900, "<x>": 901, "<|im_end|>": 902, "</s>": 2}
        (folder / "added_tokens.json").write_text(json.dumps(added), "utf-8")
        config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>"}
        write_config(folder, additional_special_tokens=["<|im_start|>"], **config)
        tokenizer = load(folder)
        ids = tokenizer.encode_prompt("<|im_end|>")
        assert [one for one in ids if one >= 900] == [900, 902, 900]
        assert tokenizer.decode([900, 901, 902]) == "<x>"
        assert tokenizer.stop_token_ids == (902,)
        write_config(folder, added_tokens_decoder={}, **config)
        with pytest.raises(CheckpointError, match=r"of the vocabulary \('<\|im_end\|>' is none\)"):
            load(folder)

    def test_a_pad_token_that_is_an_ordinary_piece(self, folder: Path) -> None:
        config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
        write_config(folder, **config)
        before = load(folder)
        piece, token_id = "e", before.encode("we")[-1]
        assert before.token_bytes(token_id) == b"e"
        added = {str(token_id): {"content": piece, "special": True}}
        write_config(folder, added_tokens_decoder=added, pad_token=piece, **config)
        found = load(folder)
        assert found.special == before.special
        assert found.encode("we the") == before.encode("we the")
        write_config(folder, added_tokens_decoder=added, **{**config, "eos_token": piece})
        with pytest.raises(CheckpointError, match="as ordinary text"):
            load(folder)

    @pytest.mark.parametrize("legacy", [True, False])
    def test_words_that_are_added_tokens(self, folder: Path, legacy: bool) -> None:
        added = {"900": {"content": "C++"}, "901": {"content": "fox", "special": True}}
        config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "eos_token": "</s>"}
        write_config(folder, added_tokens_decoder=added, **config)
        tokenizer = load(folder)
        assert {*tokenizer.special} == {"<unk>", "<s>", "</s>", "fox"}
        ids = tokenizer.encode("the foxC++the C++ quick")
        assert ids.count(900) == 2
        assert not {901} & {*ids}
        # Legacy tokenizers prepend a space to text after a word, unless it begins with one.
        text = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert text == f" the foxC++{' ' if legacy else ''}the C++ quick"
        assert tokenizer.encode("the fox") == ids[: ids.index(900)]
        assert ids[-1:] == tokenizer.encode("quick")[-1:]

    @pytest.mark.parametrize("added", [["<x>"], {"<x>": "5"}, {"<x>": True}])
    def test_a_broken_older_file(self, folder: Path, added: object) -> None:
        (folder / "added_tokens.json").write_text(json.dumps(added), "utf-8")
        write_config(folder, tokenizer_class="LlamaTokenizer", eos_token="</s>")
        with pytest.raises(CheckpointError, match=r"added_tokens\.json"):
            load(folder)

    @pytest.mark.parametrize(
        ("added", "message"),
        [
            ([], "has no id that ends an answer"),
            ({"5": 5}, "added_tokens_decoder"),
            ({"5": {}}, "each with an object that has content"),
            ({"a": {"content": "<x>"}}, "object of ids"),
            ({"5": {"content": "▁"}}, "'▁' as ordinary text"),
        ],
    )
    def test_a_broken_configuration(self, folder: Path, added: Any, message: str) -> None:
        write_config(folder, tokenizer_class="LlamaTokenizer", added_tokens_decoder=added)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
