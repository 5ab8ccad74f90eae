"""The tokenizer of Qwen2, on a small vocabulary in its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from glm_multiuser.errors import CheckpointError, InvalidParameterError
from glm_multiuser.tokenizers import (
    HuggingFaceTokenizer,
    ToolCall,
    chat_template,
    load_tokenizer,
)
from glm_multiuser.tokenizers.answers import TaggedAnswerReader
from glm_multiuser.tokenizers.chat_template import ChatTemplate
from tests.tokenizers.conftest import QWEN2_SHOWN, QWEN2_SPECIAL, write_config

TOOLS = [{"type": "function", "function": {"name": "f", "description": "<|im_end|> <tool_call>"}}]
NAMES = [*QWEN2_SPECIAL, *QWEN2_SHOWN]
FRAGMENTS = ["<", "<|", "<|im_", "im_end|>", "end|>", "|>", ">", " ", "\n", "a", "\U000f0000"]

SPACES = [chr(one) for one in range(0x3001) if chr(one).isspace()]

tricky_texts = st.lists(st.sampled_from([*NAMES, *FRAGMENTS]), max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder: Path) -> HuggingFaceTokenizer:
    found = load_tokenizer(qwen2_folder)
    assert isinstance(found, HuggingFaceTokenizer)
    return found


@pytest.fixture(scope="module")
def original(qwen2_folder: Path) -> Any:
    return Tokenizer.from_file(str(qwen2_folder / "tokenizer.json"))


def messages(*texts: str) -> list[dict[str, Any]]:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return [{"role": role, "content": text} for role, text in zip(roles, texts)]


def count(ids: list[int], tokenizer: HuggingFaceTokenizer) -> dict[str, int]:
    return {name: ids.count(tokenizer.special[name]) for name in NAMES}


class TestText:
    @pytest.mark.parametrize("text", ["", " ", "你好, world!\n\n  it's", "\x00👋", "e\u0301"])
    def test_ids_are_those_of_the_library(
        self, tokenizer: HuggingFaceTokenizer, original: Any, text: str
    ) -> None:
        ids = tokenizer.encode(text)
        assert ids == original.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == original.decode(ids)

    @settings(deadline=None, max_examples=100)
    @given(text=tricky_texts)
    def test_text_never_becomes_a_special_token(
        self, tokenizer: HuggingFaceTokenizer, text: str
    ) -> None:
        ids = tokenizer.encode(text)
        assert not set(tokenizer.special.values()).intersection(ids)
        assert tokenizer.decode(ids) == text

    def test_answers_show_only_some_special_tokens(self, tokenizer: HuggingFaceTokenizer) -> None:
        assert tokenizer.decode(list(tokenizer.special.values())) == "<tool_call></tool_call>"
        assert tokenizer.token_bytes(tokenizer.special["<|im_end|>"]) == b"<|im_end|>"

    def test_ends(self, tokenizer: HuggingFaceTokenizer) -> None:
        names = ["<|im_end|>", "<|endoftext|>"]
        assert tokenizer.stop_token_ids == tuple(tokenizer.special[name] for name in names)
        assert tokenizer.process_response(" a\n") == " a\n"


class TestTemplate:
    def test_ids_are_those_of_the_rendered_text(
        self, tokenizer: HuggingFaceTokenizer, original: Any
    ) -> None:
        ids = tokenizer.encode_messages(messages("be brief", "\n\n你好 ", "hi", "the fox"))
        rendered = (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
            "<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert ids == original.encode(rendered).ids
        history = [{"role": "system", "content": "be brief"}, ("\n\n你好 ", "hi")]
        assert tokenizer.encode_prompt("the fox", history) == ids

    def test_tools_and_calls(self, tokenizer: HuggingFaceTokenizer, original: Any) -> None:
        tools = [{"type": "function", "function": {"name": "f", "description": "天气"}}]
        function = {"name": "f", "arguments": '{"city":"北京"}'}
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "22"},
        ]
        rendered = (
            f"<|im_start|>system\n# Tools\n<tools>\n{json.dumps(tools[0], ensure_ascii=False)}\n"
            "</tools>\nAnswer with <tool_call></tool_call><|im_end|>\n"
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n"
            '{"name": "f", "arguments": {"city": "北京"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n22\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert tokenizer.encode_messages(conversation, tools) == original.encode(rendered).ids
        assert isinstance(tokenizer.answer_reader(tools), TaggedAnswerReader)

    def test_calls_between_tags_that_a_file_hides(self, copied: Path) -> None:
        file = copied / "tokenizer.json"
        content = json.loads(file.read_text("utf-8"))
        content["added_tokens"] = [{**one, "special": True} for one in content["added_tokens"]]
        file.write_text(json.dumps(content), "utf-8")
        found = HuggingFaceTokenizer.from_folder(copied)
        opening, closing = (found.special[name] for name in QWEN2_SHOWN)
        call = found.encode('\n{"name": "f", "arguments": {"a": 1}}\n')
        reader = found.answer_reader(TOOLS)
        reader.feed(found.decode([opening, *call, closing]))
        assert reader.finish().tool_calls == (ToolCall("f", '{"a": 1}'),)

    @pytest.mark.slow
    @settings(deadline=None, max_examples=100)
    @given(texts=st.lists(tricky_texts, min_size=4, max_size=4))
    def test_no_text_writes_a_special_token(
        self, tokenizer: HuggingFaceTokenizer, texts: list[str]
    ) -> None:
        plain = tokenizer.encode_messages(messages("a", "b", "c", "d"), TOOLS)
        ids = tokenizer.encode_messages(messages(*texts), TOOLS)
        found, expected = count(ids, tokenizer), count(plain, tokenizer)
        for name in QWEN2_SHOWN:  # the third text is the model's own
            expected[name] += texts[2].count(name)
        assert found == expected
        shown = "".join(tokenizer.token_bytes(one).decode("latin-1") for one in ids)
        assert texts[3].strip().encode().decode("latin-1") in shown

    def test_no_argument_writes_a_special_token(self, tokenizer: HuggingFaceTokenizer) -> None:
        def ids(text: str) -> list[int]:
            function = {"name": "f", "arguments": json.dumps({text: [text, {"role": text}]})}
            conversation: list[dict[str, Any]] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
                {"role": "tool", "content": text},
            ]
            return tokenizer.encode_messages(conversation, TOOLS)

        for name in QWEN2_SPECIAL:
            assert count(ids(name), tokenizer) == count(ids("a"), tokenizer)

    @pytest.mark.parametrize("flags", [("lstrip",), ("rstrip",), ("lstrip", "rstrip")])
    def test_special_tokens_that_take_in_whitespace(
        self, copied: Path, flags: tuple[str, ...]
    ) -> None:
        content = json.loads((copied / "tokenizer.json").read_text("utf-8"))
        for token in content["added_tokens"]:
            if token["content"] in ("<|im_end|>", "<tool_call>"):
                token.update(dict.fromkeys(flags, True))
        (copied / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        text = "".join(
            f"{one} a{one} <|im_end|>{one} b <tool_call><|im_end|>{one}" for one in SPACES
        )
        write_config(copied, chat_template=f"{{{{ {json.dumps(text)} }}}}")
        found = HuggingFaceTokenizer.from_folder(copied)
        library = Tokenizer.from_file(str(copied / "tokenizer.json"))
        assert found.encode_prompt("x") == library.encode(text, add_special_tokens=False).ids

    def test_without_a_template_chat_ml_is_written(self, copied: Path, original: Any) -> None:
        write_config(copied, eos_token={"content": "<|im_end|>"})
        found = HuggingFaceTokenizer.from_folder(copied)
        rendered = "<|im_start|>user\n hi <|im_end|>\n<|im_start|>assistant\n"
        assert found.encode_prompt(" hi ") == original.encode(rendered).ids
        for use in (found.answer_reader, lambda tools: found.encode_messages([], tools)):
            with pytest.raises(InvalidParameterError, match=r"tools is .*does not mention"):
                use(TOOLS)
        with pytest.raises(InvalidParameterError, match=r"one of system, user, assistant$"):
            found.encode_messages([{"role": "tool", "content": "a"}])

    def test_a_template_that_refuses(self, copied: Path) -> None:
        write_config(copied, chat_template="{{ raise_exception('no ' + messages[0].role) }}")
        with pytest.raises(InvalidParameterError, match="chat template: no user"):
            HuggingFaceTokenizer.from_folder(copied).encode_prompt("a")

    @pytest.mark.parametrize(
        "template",
        ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[9].content }}"],
    )
    def test_a_template_that_cannot_be_rendered(self, copied: Path, template: str) -> None:
        write_config(copied, chat_template=template)
        with pytest.raises(InvalidParameterError, match="messages cannot be written"):
            HuggingFaceTokenizer.from_folder(copied).encode_prompt("a")

    @pytest.mark.parametrize(
        "template", ["{{ 'x' * 101 }}", "{% for _ in range(1000) %}xx{% endfor %}"]
    )
    def test_a_template_that_writes_without_end(
        self, copied: Path, monkeypatch: pytest.MonkeyPatch, template: str
    ) -> None:
        """It is not rendered to its end."""
        monkeypatch.setattr(chat_template, "LONGEST", 100)
        write_config(copied, chat_template=template + "{{ raise_exception('the end') }}")
        with pytest.raises(InvalidParameterError, match="it writes more than 100 characters"):
            HuggingFaceTokenizer.from_folder(copied).encode_prompt("a")

    @pytest.mark.parametrize(
        ("template", "message"),
        [("{% if %}", "line 1 is not Jinja2"), (5, "is int"), ([], "NoneType")],
    )
    def test_a_broken_template(self, copied: Path, template: Any, message: str) -> None:
        write_config(copied, chat_template=template or [{"name": "rag"}])
        with pytest.raises(CheckpointError, match=message) as caught:
            load_tokenizer(copied)
        assert "tokenizer_config.json" in str(caught.value)

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            (
                "{% for m in messages %}\n    {%- if m.role == 'assistant' %}\n"
                "    {%- generation -%}\n  {{ m.content }}<e>\n    {%- endgeneration %}\n\n"
                "    {% else %}\n{{ m.role }}: {{ m.content }}\n    {% endif %}\n{% endfor %}",
                "user: q\n a<b> <e>\nuser: r\n",
            ),
            (
                "{% set a = 1 %}{% for m in messages %}{% generation %}{% set a = a + 1 %}"
                "{{ a }}{{ loop.index }}{{ loop.last }}{% endgeneration %}|{{ a }}\n{% endfor %}",
                "21False|1\n22False|1\n23True|1\n",
            ),
        ],
    )
    def test_what_training_marks_is_written_as_transformers_does(
        self, template: str, text: str
    ) -> None:
        # By `AssistantTracker` of transformers 4.57.1, with its settings of Jinja2.
        said = [("user", "q"), ("assistant", " a<b> "), ("user", "r")]
        written = [{"role": role, "content": content} for role, content in said]
        assert ChatTemplate(template).render(written) == text

    def test_other_places_of_a_template(self, copied: Path) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        user = [{"role": "user", "content": "a"}]
        default = {"name": "default", "template": "1"}
        for_tools = {"name": "tool_use", "template": "{{ tools[0].function.name }}2<tool_call>"}
        write_config(copied, chat_template=[for_tools, default])
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.encode_messages(user) == found.encode("1")
        assert found.decode(found.encode_messages(user, tools)).startswith("f2")
        write_config(copied, chat_template=[default])
        with pytest.raises(InvalidParameterError, match="does not mention tools"):
            HuggingFaceTokenizer.from_folder(copied).encode_messages(user, tools)
        write_config(copied, chat_template=[for_tools])
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.decode(found.encode_messages(user, tools)).startswith("f2")
        (copied / "chat_template.jinja").write_text("{{ eos_token }}3")
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.encode_prompt("a") == found.encode("3")
        # As `PreTrainedTokenizerBase` of transformers reads it: files only, if there are any.
        (copied / "additional_chat_templates").mkdir()
        (copied / "additional_chat_templates" / "tool_use.jinja").write_text(
            "4{{ tools is none }}<tool_call>"
        )
        (copied / "additional_chat_templates" / "rag.jinja").write_text("{{ no template")
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.encode_prompt("a") == found.encode("3")
        assert found.decode(found.encode_messages(user, tools)) == "4False<tool_call>"
        (copied / "chat_template.jinja").unlink()
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.decode(found.encode_prompt("a")) == "4True<tool_call>"
        # Those of other names are for neither.
        (copied / "additional_chat_templates" / "tool_use.jinja").unlink()
        write_config(copied, chat_template="5")
        found = HuggingFaceTokenizer.from_folder(copied)
        assert found.encode_prompt("a") == found.encode("5")


class TestFiles:
    def test_the_older_files(
        self, qwen2_older_folder: Path, tokenizer: HuggingFaceTokenizer
    ) -> None:
        found = load_tokenizer(qwen2_older_folder)
        assert isinstance(found, HuggingFaceTokenizer)
        assert found.special == tokenizer.special
        assert found.stop_token_ids == tokenizer.stop_token_ids
        text = "你好, the quick brown fox. it's\n\n123"
        assert found.decode(found.encode(text)) == text
        assert found.encode("the quick") == tokenizer.encode("the quick")

    @pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
    def test_an_older_file_is_missing(
        self, qwen2_older_folder: Path, tmp_path: Path, name: str
    ) -> None:
        for file in qwen2_older_folder.iterdir():
            if file.name != name:
                (tmp_path / file.name).write_bytes(file.read_bytes())
        with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
            load_tokenizer(tmp_path)

    def test_older_files_of_another_class(self, qwen2_older_folder: Path, tmp_path: Path) -> None:
        for file in qwen2_older_folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
        write_config(tmp_path, **{**settings, "tokenizer_class": "GPT2Tokenizer"})
        with pytest.raises(CheckpointError, match=r"'GPT2Tokenizer'; without tokenizer\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("added", [None, {}, {"400": "<|im_end|>"}])
    def test_older_files_without_special_tokens(
        self, qwen2_older_folder: Path, tmp_path: Path, added: Any
    ) -> None:
        for name in ("vocab.json", "merges.txt"):
            (tmp_path / name).write_bytes((qwen2_older_folder / name).read_bytes())
        write_config(tmp_path, tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": {}}, "not a BPE vocabulary"),
            ({"model": 5}, "not a BPE vocabulary"),
            ({"added_tokens": [{}]}, "added token of another shape"),
            ({"decoder": {"type": "WordPiece"}}, "'WordPiece'"),
            ({"normalizer": {"type": "no such"}}, "cannot be read by tokenizers"),
        ],
    )
    def test_a_broken_vocabulary(self, copied: Path, change: Any, message: str) -> None:
        file = copied / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with pytest.raises(CheckpointError, match=message) as caught:
            load_tokenizer(copied)
        assert "tokenizer.json" in str(caught.value)

    def test_merges_as_pairs(self, copied: Path, tokenizer: HuggingFaceTokenizer) -> None:
        file = copied / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["merges"] = [
            one.split(" ") if isinstance(one, str) else one for one in content["model"]["merges"]
        ]
        file.write_text(json.dumps(content))
        assert HuggingFaceTokenizer.from_folder(copied).encode("the fox") == tokenizer.encode(
            "the fox"
        )

    def test_a_special_token_that_users_could_write(self, copied: Path) -> None:
        file = copied / "tokenizer.json"
        content = json.loads(file.read_text())
        pairs = [one for one in content["model"]["vocab"] if len(one) == 2 and one.isalpha()]
        name = next(one for one in pairs if one.isascii())
        content["added_tokens"][0].update(content=name, id=content["model"]["vocab"][name])
        file.write_text(json.dumps(content))
        write_config(copied, eos_token=name)
        with pytest.raises(CheckpointError, match=f"{name!r} as ordinary text"):
            load_tokenizer(copied)

    def test_ends_of_the_generation_config(
        self, copied: Path, tokenizer: HuggingFaceTokenizer
    ) -> None:
        (copied / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
        write_config(copied)
        assert HuggingFaceTokenizer.from_folder(copied).stop_token_ids[:2] == (7, 8)

    def test_no_end_at_all(self, copied: Path) -> None:
        file = copied / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "added_tokens": []}))
        write_config(copied)
        with pytest.raises(CheckpointError, match="eos_token"):
            load_tokenizer(copied)
