"""Special tokens: where a folder names them, and what prompts make of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers import HuggingFaceTokenizer
from glm_multiuser.tokenizers.base import Vocabulary
from glm_multiuser.tokenizers.chat_template import ChatTemplate
from glm_multiuser.tokenizers.tokenizer_json import read_hugging_face_files, vocabulary_of
from tests.tokenizers.conftest import golden_json, write_config

END = "<|im_end|>"
START: dict[str, Any] = {"content": "<|im_start|>", "lstrip": False, "rstrip": False}

AWKWARD = ["=", "====", "-==-", "abab", "§", "§§", "<|a", "|b"]
"""Names of one character, and names that overlap themselves or others."""

awkward_texts = st.lists(st.sampled_from([*AWKWARD, *"=-ab§<| x\n"]), max_size=6).map("".join)


@pytest.fixture(scope="module")
def awkward(qwen2_folder: Path) -> Vocabulary:
    vocabulary = read_hugging_face_files(qwen2_folder)
    more = {name: 1000 + place for place, name in enumerate(AWKWARD)}
    return replace(vocabulary, special={**vocabulary.special, **more})


WORDS = ["New York", "Yorkshire", "大语言模型", "语言", "is", "  ", "é"]
"""Some overlap others; "is" must stand alone."""


MARKED = ["C++", "e-mail", "don't", "go", "the"]


@pytest.fixture(scope="module")
def words(qwen2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("words")
    shutil.copytree(qwen2_folder, folder, dirs_exist_ok=True)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([AddedToken(one, single_word=one == "is") for one in WORDS])
    library.save(str(folder / "tokenizer.json"))
    return library, HuggingFaceTokenizer.from_folder(folder)


class TestTexts:
    @settings(deadline=None, max_examples=100)
    @given(text=awkward_texts)
    def test_ids_are_those_of_ordinary_text(self, awkward: Vocabulary, text: str) -> None:
        template = ChatTemplate("§{{ messages[0].content }}<|a{{ messages[1].content }}=")
        found = HuggingFaceTokenizer(awkward, template, (0,))
        first, second, last = (found.special[name] for name in ("§", "<|a", "="))
        said = [{"role": role, "content": text} for role in ("user", "assistant")]
        ids = found.encode(text)
        assert found.encode_messages(said) == [first, *ids, second, *ids, last]

    @pytest.mark.parametrize("around", [("-", "-"), ("|", "a"), ("ab", "b"), ("|<", "b")])
    @settings(deadline=None, max_examples=50)
    @given(text=awkward_texts)
    def test_the_template_writes_the_rest_of_no_name(
        self, awkward: Vocabulary, around: tuple[str, str], text: str
    ) -> None:
        before, after = around
        template = ChatTemplate(f"{before}{{{{ messages[0].content | trim }}}}{after}")
        found = HuggingFaceTokenizer(awkward, template, (0,))
        assert found.encode_prompt(text) == found.encode(before + text.strip() + after)


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


class TestDeclared:
    """The vocabulary file has no such added token, but perhaps a piece of that name."""

    @staticmethod
    def load(folder: Path, *removed: str, **config: Any) -> HuggingFaceTokenizer:
        content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        for one in content["added_tokens"]:
            if one["content"] in removed:
                content["model"]["vocab"][one["content"]] = one["id"]
        content["added_tokens"] = [
            one for one in content["added_tokens"] if one["content"] not in removed
        ]
        (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        write_config(folder, chat_template="{{ messages[0].content }}" + END, **config)
        return HuggingFaceTokenizer.from_folder(folder)

    @pytest.mark.parametrize(
        "config",
        [
            {"eos_token": {"content": END}},
            {"additional_special_tokens": ["no such piece", END]},
            {"extra_special_tokens": [{"content": END}]},
            {"extra_special_tokens": {"the_end": END}},
            {"added_tokens_decoder": {"7": {"content": END, "special": True}}},
        ],
    )
    def test_a_name(self, copied: Path, qwen2_folder: Path, config: dict[str, Any]) -> None:
        before = HuggingFaceTokenizer.from_folder(qwen2_folder)
        found = self.load(copied, END, **config)
        assert found.special == before.special
        assert found.stop_token_ids[0] == before.special[END]
        assert found.encode_prompt(END) == [*before.encode(END), before.special[END]]
        assert found.decode([before.special[END]]) == ""

    def test_a_name_in_the_other_file(self, copied: Path) -> None:
        (copied / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}), "utf-8")
        found = self.load(copied, END)
        assert found.encode_prompt("a")[-1] == found.special[END] == found.stop_token_ids[0]

    def test_a_new_token(self, copied: Path) -> None:
        new = {"content": "<new>", "special": True, "lstrip": True}
        found = self.load(copied, eos_token="<new>", added_tokens_decoder={"1000": new})
        assert found.stop_token_ids[0] == found.special["<new>"] == 1000
        found = self.load(copied, added_tokens_decoder={"401": {**new, "content": END}})
        # Settings are those of the configuration, the id is that of the vocabulary.
        assert found.encode_prompt("a ") == [*found.encode("a"), found.special[END]]

    def test_tokens_of_the_older_file(self, copied: Path, qwen2_folder: Path) -> None:
        before = HuggingFaceTokenizer.from_folder(qwen2_folder)
        added = {**before.special, "<new>": 1000, "<x>": 1001}
        (copied / "added_tokens.json").write_text(json.dumps(added), "utf-8")
        found = self.load(copied, eos_token="<new>")
        assert found.special == added
        assert found.stop_token_ids[0] == 1000
        # Those of the vocabulary file have its settings.
        assert found.decode([*added.values()]) == "<tool_call></tool_call><x>"

    def test_ordinary_text_stays_text(self, copied: Path) -> None:
        found = self.load(copied, pad_token="!", unk_token="the")
        assert not {"!", "the"} & {*found.special}
        assert len(found.encode("!")) == len(found.encode("the")) == 1
        with pytest.raises(CheckpointError, match="'<new>' with id 5, which is ordinary text"):
            self.load(copied, added_tokens_decoder={"5": {"content": "<new>"}})


def with_dots(kind: str) -> dict[str, Any]:
    """A vocabulary, byte-level ones with ".." and "....", too."""
    content = golden_json(kind)["tokenizer"]
    if kind == "llama_spm":
        return content
    first = max(content["model"]["vocab"].values()) + 100
    content["model"]["vocab"].update({"..": first, "....": first + 1})
    content["model"]["merges"] += [". .", ".. .."]
    return content


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama_bpe", "."), ("llama_bpe", ".."), ("qwen2", "th"), ("llama_spm", "he")],
)
class TestPieces:
    """Added tokens that are pieces: of a `pad_token`, a folder that is saved again has one."""

    TEXT = "the other hen. ... and .... five..."

    @staticmethod
    def content(kind: str, name: str, special: bool) -> dict[str, Any]:
        content = with_dots(kind)
        token = {**content["added_tokens"][0], "normalized": False, "special": special}
        token.update(content=name, id=content["model"]["vocab"][name])
        return {**content, "added_tokens": [*content["added_tokens"], token]}

    def test_special_ones_are_ordinary_text(self, kind: str, name: str) -> None:
        before = vocabulary_of(with_dots(kind), Path("a"))
        content = self.content(kind, name, True)
        for declared in ([], [name], [content["added_tokens"][-1]]):
            found = vocabulary_of(content, Path("a"), declared)
            assert found.encode(self.TEXT) == before.encode(self.TEXT)
            assert found.special == before.special
            assert found.pieces == before.pieces

    def test_others_are_words(self, kind: str, name: str) -> None:
        content = self.content(kind, name, False)
        library = Tokenizer.from_str(json.dumps(content))
        ids = library.encode(self.TEXT, add_special_tokens=False).ids
        assert vocabulary_of(content, Path("a")).encode(self.TEXT) == ids

    def test_those_that_end_answers_are_refused(self, kind: str, name: str) -> None:
        with pytest.raises(CheckpointError, match=f"{name!r} as ordinary text"):
            vocabulary_of(self.content(kind, name, True), Path("a"), [name], [name])


class TestWords:
    TEXT = "你好 ж€, a你 ※\n ж ж"

    @pytest.fixture
    def library(self, copied: Path) -> Any:
        found = Tokenizer.from_file(str(copied / "tokenizer.json"))
        found.add_tokens([AddedToken(one, normalized=True) for one in "你ж€"])
        found.add_special_tokens(["※"])
        found.save(str(copied / "tokenizer.json"))
        write_config(copied, eos_token=END, chat_template="a {{ messages[0].content }}" + END)
        return found

    def test_letters_are_ordinary_text(self, copied: Path, library: Any) -> None:
        """Those of DeepSeek, such as "ü", are not marked as special."""
        found = HuggingFaceTokenizer.from_folder(copied)
        text = self.TEXT.replace("※", "")
        ids = library.encode(text).ids
        assert found.encode(text) == ids
        assert found.decode(ids) == text
        assert found.encode_prompt(text) == library.encode(f"a {text}{END}").ids
        assert not set(ids) & found.special_ids

    @settings(deadline=None, max_examples=200)
    @given(text=st.lists(st.sampled_from([*WORDS, *"大语 sY", "this", "<|im_end|>"])).map("".join))
    def test_words_are_ordinary_text(self, words: tuple[Any, Any], text: str) -> None:
        library, found = words
        ids = library.encode(text.replace("<|im_end|>", "")).ids
        assert found.encode(text.replace("<|im_end|>", "")) == ids
        assert found.decode(ids) == text.replace("<|im_end|>", "")
        assert not {*found.encode(text)} & found.special_ids

    @pytest.mark.parametrize("normalized", [True, False])
    @settings(deadline=None, max_examples=100)
    @given(text=st.lists(st.sampled_from([*MARKED, *"the +go  "])).map("".join))
    def test_with_sentencepiece(self, normalized: bool, text: str) -> None:
        library = Tokenizer.from_str(json.dumps(golden_json("llama_spm")["tokenizer"]))
        library.add_tokens([AddedToken(one, normalized=normalized) for one in MARKED])
        found = vocabulary_of(json.loads(library.to_str()), Path("a"))
        assert found.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert not {*MARKED} & {*found.special}

    def test_with_marks(self, copied: Path, qwen2_folder: Path) -> None:
        library = Tokenizer.from_file(str(copied / "tokenizer.json"))
        names = ["<i>", "[a]", "|b|", "a|b", "--a", "a:", "_a_", "###"]
        library.add_tokens([*MARKED, *names])
        library.save(str(copied / "tokenizer.json"))
        found = HuggingFaceTokenizer.from_folder(copied)
        text = "I don't e-mail C++"
        assert found.encode(text) == library.encode(text).ids
        before = HuggingFaceTokenizer.from_folder(qwen2_folder)
        assert {*found.special} - {*before.special} == {*names}

    def test_a_word_that_ends_answers_is_special(self, copied: Path) -> None:
        library = Tokenizer.from_file(str(copied / "tokenizer.json"))
        library.add_tokens(["STOP"])
        library.save(str(copied / "tokenizer.json"))
        write_config(copied, eos_token="STOP", chat_template="{{ messages[0].content }}STOP")
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.stop_token_ids[0] == found.special["STOP"] not in found.encode("STOP")

    def test_special_ones_are_not(self, copied: Path, library: Any) -> None:
        found = HuggingFaceTokenizer.from_folder(copied)
        ids = found.encode(self.TEXT)
        assert found.special["※"] == library.token_to_id("※") not in ids
        assert found.decode(ids) == self.TEXT
        assert found.encode_prompt(self.TEXT) == [
            *found.encode("a " + self.TEXT),
            found.special[END],
        ]
