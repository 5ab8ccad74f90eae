"""The ChatGLM-6B tokenizer against the original, and against texts that try to fool it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glm_multiuser.errors import CheckpointError, InvalidParameterError
from glm_multiuser.tokenizers import ChatGLM6BTokenizer, load_tokenizer
from glm_multiuser.tokenizers.chatglm_6b import CLEAN_UP, SPECIAL_PIECES
from tests.golden_data import golden_folder
from tests.tokenizers.conftest import CONTROL, WHITESPACE, TrainFile

GOLDEN_CASES = 226
LOOKALIKES = [
    *SPECIAL_PIECES,
    *("<n>", "<|tab|>", "<|blank_2|>", "<|blank_80|>", "<|blank_81|>", "<|user|>"),
    *(
        "<",
        "sop",
        ">",
        "[",
        "gMASK",
        "]",
        "<0x0A>",
        "▁",
        "＜ｓｏｐ＞",
        "[ｇＭＡＳＫ]",
        "<s\u200bop>",
    ),
    *("\n", "\t", " ", "  ", "你好", "👋", "\ue000", "\ufffd", "\u2047", "\x00", "hello"),
]
"""Names of symbols, halves of them, ways to disguise them, and what may stand between."""

Loaded = tuple[Any, ChatGLM6BTokenizer, ChatGLM6BTokenizer]

tricky_texts = st.lists(st.one_of(st.sampled_from(LOOKALIKES), st.text(max_size=8))).map("".join)


def whitespace_of(symbol: str) -> str:
    if symbol.startswith("<|blank_"):
        return " " * int(symbol[len("<|blank_") : -len("|>")])
    return {"<n>": "\n", "<|tab|>": "\t"}[symbol]


def decoded_by_replacement(processor: Any, ids: list[int]) -> str:
    """The original's way to decode: whitespace symbols are replaced in the text, not by id."""
    text: str = processor.decode(ids)
    # Without this the two ways rightly differ: see ChatGLM6BTokenizer.decode.
    names = {symbol: processor.piece_to_id(symbol) for symbol in WHITESPACE}
    assume(all(text.count(name) == ids.count(one) for name, one in names.items()))
    return reduce(lambda known, name: known.replace(name, whitespace_of(name)), names, text)


def cleaned(text: str) -> str:
    return reduce(lambda known, pair: known.replace(*pair), CLEAN_UP, text)


class TestAgainstTheOriginal:
    def test_there_are_all_cases(self, golden: dict[str, Any]) -> None:
        assert len(golden["cases"]) == GOLDEN_CASES
        assert len(golden["chat"]) == 12
        assert len(golden["process_response"]) == 9

    def test_ids(self, real: ChatGLM6BTokenizer, golden: dict[str, Any]) -> None:
        wrong = [
            one["text"] for one in golden["cases"] if real.encode(one["text"]) != one["sp_ids"]
        ]
        assert not wrong

    def test_decoded_as_chat_shows_it(
        self, real: ChatGLM6BTokenizer, golden: dict[str, Any]
    ) -> None:
        wrong = [
            one["text"] for one in golden["cases"] if real.decode(one["sp_ids"]) != one["decoded"]
        ]
        assert not wrong

    def test_decoded_without_clean_up(self, real_folder: Path, golden: dict[str, Any]) -> None:
        plain = ChatGLM6BTokenizer(real_folder / "ice_text.model", clean_up_spaces=False)
        cases = golden["cases"]
        assert not [
            one["text"] for one in cases if plain.decode(one["sp_ids"]) != one["sp_decoded"]
        ]
        with_prefixes = [one for one in cases if "prefix_sp_decoded" in one]
        assert len(with_prefixes) > 150
        for one in with_prefixes:
            ids = one["sp_ids"]
            prefixes = [plain.decode(ids[: end + 1]) for end in range(len(ids))]
            assert prefixes == one["prefix_sp_decoded"]

    def test_special_tokens_are_left_out(
        self, real: ChatGLM6BTokenizer, golden: dict[str, Any]
    ) -> None:
        plain = [one for one in golden["cases"] if one["ids_without_special"] == one["sp_ids"]]
        assert len(plain) > 150
        for one in plain:
            assert one["input_ids"][-2:] == [130001, 130004]
            assert real.decode(one["input_ids"]) == one["decoded"]

    def test_prompts(self, real: ChatGLM6BTokenizer, golden: dict[str, Any]) -> None:
        compared = 0
        for one in golden["chat"]:
            ids = real.encode_prompt(one["query"], one["history"])
            pair_texts = [text for pair in one["history"] for text in pair]
            if any(name in text for name in SPECIAL_PIECES for text in [one["query"], *pair_texts]):
                # The original reads special tokens here; this library must not.
                assert not real.special_ids.intersection(ids[:-2])
                assert ids != one["input_ids"]
            else:
                compared += 1
                assert ids == one["input_ids"], one["query"]
        assert compared == 11

    def test_punctuation(self, real: ChatGLM6BTokenizer, golden: dict[str, Any]) -> None:
        for one in golden["process_response"]:
            assert real.process_response(one["text"]) == one["processed"]

    def test_numbers_of_the_released_file(
        self, real: ChatGLM6BTokenizer, golden: dict[str, Any]
    ) -> None:
        special = golden["special_ids"]
        assert real.vocab_size == golden["vocab_size"]
        assert real.gmask_token_id == special["[gMASK]"]
        assert real.bos_token_id == special["<sop>"]
        assert real.stop_token_ids == (special["<eop>"],)
        assert real.special_ids == {special[name] for name in SPECIAL_PIECES}


class TestEndToEnd:
    def test_numbers_of_the_small_file(
        self, small: ChatGLM6BTokenizer, folder: Path, expected: dict[str, Any]
    ) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        assert small.vocab_size == expected["vocab"]
        assert small.gmask_token_id == config["gmask_token_id"]
        assert small.bos_token_id == config["bos_token_id"]
        assert small.stop_token_ids == (config["eos_token_id"],)

    def test_single_questions(self, small: ChatGLM6BTokenizer, expected: dict[str, Any]) -> None:
        compared = 0
        for one in expected["single"]:
            ids = one["output_ids"]
            assert small.decode(ids) == one["raw_decoded"]
            assert small.process_response(one["raw_decoded"]) == one["response"]
            streamed = [
                small.process_response(small.decode(ids[: end + 1]))
                for end in range(len(one["stream_responses"]))
            ]
            assert streamed == one["stream_responses"]
            if "<sop>" not in one["query"]:
                compared += 1
                assert small.encode_prompt(one["query"], one["history"]) == one["input_ids"]
        assert compared == 10

    def test_session(self, small: ChatGLM6BTokenizer, expected: dict[str, Any]) -> None:
        history: list[tuple[str, str]] = []
        for one in expected["session"]:
            assert small.encode_prompt(one["query"], history) == one["input_ids"]
            answer = small.process_response(small.decode(one["output_ids"]))
            assert answer == one["response"]
            history.append((one["query"], answer))
        assert len(history) == 3


class TestText:
    @pytest.mark.slow
    @settings(deadline=None, max_examples=100)
    @given(text=tricky_texts)
    def test_text_never_becomes_a_special_token(
        self, tokenizer: ChatGLM6BTokenizer, text: str
    ) -> None:
        assert not tokenizer.special_ids.intersection(tokenizer.encode(text))

    @pytest.mark.slow
    @settings(deadline=None, max_examples=100)
    @given(query=tricky_texts, history=st.lists(st.tuples(tricky_texts, tricky_texts), max_size=2))
    def test_a_prompt_has_one_gmask_and_one_bos(
        self, tokenizer: ChatGLM6BTokenizer, query: str, history: list[tuple[str, str]]
    ) -> None:
        ids = tokenizer.encode_prompt(query, history)
        assert ids[-2:] == [tokenizer.gmask_token_id, tokenizer.bos_token_id]
        assert not tokenizer.special_ids.intersection(ids[:-2])

    @pytest.mark.parametrize("symbol", CONTROL)
    def test_a_spelled_special_token_comes_back_as_text(
        self, tokenizer: ChatGLM6BTokenizer, symbol: str
    ) -> None:
        assert tokenizer.decode(tokenizer.encode(f"a{symbol}b")) == f"a{symbol}b"

    @pytest.mark.parametrize("symbol", WHITESPACE)
    def test_a_spelled_whitespace_symbol_is_that_whitespace(
        self, tokenizer: ChatGLM6BTokenizer, symbol: str
    ) -> None:
        whitespace = whitespace_of(symbol)
        assert tokenizer.encode(f"a{symbol}b") == tokenizer.encode(f"a{whitespace}b")
        assert tokenizer.decode(tokenizer.encode(f"a{symbol}b")) == f"a{whitespace}b"

    @settings(deadline=None, max_examples=50)
    @given(length=st.integers(min_value=1, max_value=400))
    def test_runs_of_spaces_survive(self, tokenizer: ChatGLM6BTokenizer, length: int) -> None:
        text = f"a{' ' * length}b"
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_a_line_break_comes_from_its_own_id_only(self, file: Path) -> None:
        processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(file))
        spelled = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in b"<n>"]
        tokenizer = ChatGLM6BTokenizer(file)
        assert tokenizer.decode(spelled) == "<n>"
        assert tokenizer.decode([processor.piece_to_id("<n>")]) == "\n"

    @pytest.mark.slow
    @settings(deadline=None, max_examples=100)
    @given(data=st.data())
    def test_decode_is_sentencepiece_decode(self, loaded: Loaded, data: st.DataObject) -> None:
        processor, plain, cleaning = loaded
        space = processor.piece_to_id("▁")
        some_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in b"\x20\xe5\xa5\xbd\xf0"]
        any_id = st.integers(0, plain.vocab_size - 1)
        ids = data.draw(st.lists(st.one_of(any_id, st.sampled_from([space, *some_bytes]))))
        ids = [one for one in ids if one not in plain.special_ids]
        text = decoded_by_replacement(processor, ids)
        assert plain.decode(ids) == text
        assert cleaning.decode(ids) == cleaned(text)

    @pytest.mark.parametrize("number", range(4))
    def test_leading_spaces_go_as_the_file_says(self, loaded: Loaded, number: int) -> None:
        processor, plain, _ = loaded
        ids = [processor.piece_to_id("▁")] * number + plain.encode("!")[-1:]
        assert plain.decode(ids) == processor.decode(ids)
        eop, *_ = plain.stop_token_ids
        assert plain.decode([eop, *ids]) == processor.decode(ids)

    def test_ids_that_stand_for_no_text(self, tokenizer: ChatGLM6BTokenizer) -> None:
        ids = tokenizer.encode("hello 你好")
        text = tokenizer.decode(ids)
        nothing = [
            *sorted(tokenizer.special_ids),
            tokenizer.vocab_size,
            tokenizer.vocab_size + 99,
            -1,
        ]
        assert tokenizer.decode(nothing) == ""
        assert tokenizer.decode([*nothing, *ids, *nothing]) == text
        assert tokenizer.decode(np.array(ids, dtype=np.int32)) == text  # type: ignore[arg-type]

    @pytest.mark.parametrize("text", [b"bytes", None, 5, ["a"]])
    def test_only_strings_are_text(self, trained: ChatGLM6BTokenizer, text: Any) -> None:
        with pytest.raises(InvalidParameterError, match="must be a string"):
            trained.encode(text)
        with pytest.raises(InvalidParameterError, match="prompt is"):
            trained.encode_prompt(text)

    def test_half_of_a_surrogate_pair_is_refused(self, trained: ChatGLM6BTokenizer) -> None:
        with pytest.raises(InvalidParameterError, match="character 2"):
            trained.encode("ab\ud83d")

    def test_threads_share_one_tokenizer(self, trained: ChatGLM6BTokenizer) -> None:
        texts = [f"你好 {number}, it's <sop> fine\n" * 5 for number in range(64)]

        def there_and_back(text: str) -> tuple[list[int], str]:
            ids = trained.encode(text)
            return ids, trained.decode(ids)

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(there_and_back, texts))
        assert together == [there_and_back(text) for text in texts]


class TestHistory:
    PAIRS = (("一", "1"), ("二", "2"))

    @pytest.mark.parametrize("history", [(), [], None])
    def test_without_history_the_prompt_is_the_query(
        self, trained: ChatGLM6BTokenizer, history: Any
    ) -> None:
        end = [trained.gmask_token_id, trained.bos_token_id]
        assert trained.encode_prompt("你好", history) == [*trained.encode("你好"), *end]

    def test_rounds_are_numbered_from_zero(self, trained: ChatGLM6BTokenizer) -> None:
        text = "[Round 0]\n问：一\n答：1\n[Round 1]\n问：二\n答：2\n[Round 2]\n问：三\n答："
        assert trained.encode_prompt("三", self.PAIRS)[:-2] == trained.encode(text)

    @pytest.mark.parametrize(
        "history",
        [
            [["一", "1"], ["二", "2"]],
            [
                {"role": "user", "content": "一"},
                {"role": "assistant", "content": "1"},
                {"role": "user", "content": "二"},
                {"role": "assistant", "content": "2"},
            ],
            [{"role": "user", "content": "一"}, {"role": "assistant", "content": "1"}, ("二", "2")],
        ],
        ids=["lists", "messages", "mixed"],
    )
    def test_every_form_of_a_history_is_the_same(
        self, trained: ChatGLM6BTokenizer, history: Any
    ) -> None:
        assert trained.encode_prompt("三", history) == trained.encode_prompt("三", self.PAIRS)

    def test_a_system_message_stands_before_the_first_question(
        self, trained: ChatGLM6BTokenizer
    ) -> None:
        system = {"role": "system", "content": "be brief"}
        assert trained.encode_prompt("一", [system]) == trained.encode_prompt("be brief\n一")
        assert trained.encode_prompt("二", [system, ("一", "1")]) == trained.encode_prompt(
            "二", [("be brief\n一", "1")]
        )

    @pytest.mark.parametrize(
        ("history", "message"),
        [
            ("ab", "history is 'ab'"),
            (5, "history is 5"),
            ({"role": "user", "content": "a"}, "history is"),
            (["ab"], r"history\[0\] is 'ab'"),
            ([("a", "b"), ("a",)], r"history\[1\] is"),
            ([("a", None)], r"history\[0\]\[1\] is None"),
            ([{"role": "tool", "content": "a"}], r"history\[0\] has role 'tool'.*assistant"),
            ([{"content": "a"}], r"history\[0\] has role None"),
            ([{"role": "user"}], r"history\[0\]\['content'\] is None"),
            ([{"role": "user", "content": "a"}], r"history\[0\].*query"),
            ([{"role": "assistant", "content": "a"}], r"history\[0\] is a message of role"),
            ([{"role": "user", "content": "a"}, ("b", "c")], r"history\[1\] is a .*pair"),
            ([("b", "c"), {"role": "system", "content": "a"}], r"history\[1\].*'system'"),
        ],
    )
    def test_the_message_names_the_place(
        self, trained: ChatGLM6BTokenizer, history: Any, message: str
    ) -> None:
        with pytest.raises(InvalidParameterError, match=message):
            trained.encode_prompt("a", history)

    def test_a_large_value_is_shown_in_short(self, trained: ChatGLM6BTokenizer) -> None:
        with pytest.raises(InvalidParameterError) as caught:
            trained.encode_prompt("a", ["x" * 10_000])
        assert len(str(caught.value)) < 300


class TestFiles:
    def test_a_folder_without_tokenizer_files(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert load_tokenizer(tmp_path) is None

    def test_the_vocabulary_file_alone_is_enough(self, trained_file: Path) -> None:
        found = load_tokenizer(trained_file.parent)
        assert isinstance(found, ChatGLM6BTokenizer)
        assert found.decode([found.encode("!")[0], *found.encode("it's")]) != ""

    def test_clean_up_follows_the_configuration(self, copied: Path) -> None:
        ids = ChatGLM6BTokenizer.from_folder(copied).encode("it 's")
        assert ChatGLM6BTokenizer.from_folder(copied).decode(ids) == "it's"
        write_config(copied, clean_up_tokenization_spaces=False)
        assert ChatGLM6BTokenizer.from_folder(copied).decode(ids) == "it 's"

    @pytest.mark.parametrize(
        ("setting", "value"),
        [("remove_space", True), ("do_lower_case", True), ("num_image_tokens", 20000)],
    )
    def test_a_setting_that_changes_ids_is_refused(
        self, copied: Path, setting: str, value: Any
    ) -> None:
        write_config(copied, tokenizer_class="ChatGLMTokenizer", **{setting: value})
        with pytest.raises(CheckpointError, match=f"{setting} {value!r}"):
            load_tokenizer(copied)

    def test_another_family_is_refused(self, copied: Path) -> None:
        write_config(copied, tokenizer_class="Qwen2Tokenizer")
        with pytest.raises(CheckpointError, match=r"'Qwen2Tokenizer'.*ice_text\.model"):
            load_tokenizer(copied)
        (copied / "ice_text.model").rename(copied / "tokenizer.model")
        with pytest.raises(CheckpointError, match=r"'Qwen2Tokenizer'.*tokenizer\.model"):
            load_tokenizer(copied)

    def test_the_file_under_the_name_of_another_family_is_refused(self, copied: Path) -> None:
        (copied / "ice_text.model").rename(copied / "tokenizer.model")
        write_config(copied, tokenizer_class="ChatGLMTokenizer")
        with pytest.raises(CheckpointError, match=r"tokenizer\.model.*ice_text\.model"):
            load_tokenizer(copied)

    def test_the_configuration_alone_is_not_enough(self, tmp_path: Path) -> None:
        write_config(tmp_path, tokenizer_class="ChatGLMTokenizer")
        with pytest.raises(CheckpointError, match=r"the files tokenizer_config\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[]", ""])
    def test_a_broken_configuration(self, copied: Path, content: str) -> None:
        (copied / "tokenizer_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            load_tokenizer(copied)

    @pytest.mark.parametrize("content", [b"", b"not a model"])
    def test_a_broken_vocabulary(self, copied: Path, content: bytes) -> None:
        (copied / "ice_text.model").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"ice_text\.model"):
            load_tokenizer(copied)

    def test_missing_files(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="is not a folder"):
            load_tokenizer(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="cannot read"):
            ChatGLM6BTokenizer(tmp_path / "ice_text.model")

    def test_a_special_token_that_users_could_write(self, train_file: TrainFile) -> None:
        control = [name for name in CONTROL if name != "<eop>"]
        unsafe = train_file(control_symbols=control, user_defined_symbols=[*WHITESPACE, "<eop>"])
        with pytest.raises(CheckpointError, match="'<eop>' as ordinary text"):
            ChatGLM6BTokenizer(unsafe)

    def test_a_vocabulary_without_bytes(self, train_file: TrainFile) -> None:
        with pytest.raises(CheckpointError, match="byte_fallback"):
            ChatGLM6BTokenizer(train_file(byte_fallback=False))

    @pytest.mark.parametrize("missing", ["[gMASK]", "<sop>", "<eop>", "<n>", "<|blank_80|>"])
    def test_a_piece_that_is_missing(self, train_file: TrainFile, missing: str) -> None:
        file = train_file(
            control_symbols=[name for name in CONTROL if name != missing],
            user_defined_symbols=[name for name in WHITESPACE if name != missing],
        )
        with pytest.raises(CheckpointError) as caught:
            ChatGLM6BTokenizer(file)
        assert repr(missing) in str(caught.value)


@pytest.fixture(scope="module")
def folder() -> Path:
    return golden_folder("e2e_chatglm_6b", "expected.json", "ice_text.model")


@pytest.fixture(scope="module")
def small(folder: Path) -> ChatGLM6BTokenizer:
    return ChatGLM6BTokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "expected.json").read_text("utf-8"))
    return values


@pytest.fixture(scope="module")
def trained(trained_file: Path) -> ChatGLM6BTokenizer:
    return ChatGLM6BTokenizer(trained_file)


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"remove_extra_whitespaces": False},
        {"remove_extra_whitespaces": False, "add_dummy_prefix": False},
        {"add_dummy_prefix": False},
        "e2e_chatglm_6b",
        "tokenizer_chatglm_6b",
    ],
    ids=["trained", "keeps_spaces", "no_prefix_keeps_spaces", "no_prefix", "end_to_end", "real"],
)
def loaded(request: pytest.FixtureRequest, train_file: TrainFile) -> Loaded:
    """A file, opened by sentencepiece, without clean-up and with it."""
    if isinstance(request.param, str):
        file = golden_folder(request.param, "ice_text.model") / "ice_text.model"
    else:
        file = train_file(**request.param)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return processor, ChatGLM6BTokenizer(file, clean_up_spaces=False), ChatGLM6BTokenizer(file)


@pytest.fixture
def copied(trained_file: Path, tmp_path: Path) -> Path:
    """A folder of its own with the vocabulary file, for tests that change it."""
    (tmp_path / "ice_text.model").write_bytes(trained_file.read_bytes())
    return tmp_path


def write_config(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")


def test_bytes_of_single_ids_join_to_the_text(trained_file: Path) -> None:
    tokenizer = ChatGLM6BTokenizer(trained_file)
    text = "你好 world 𝄞\n\t  end"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text
    assert tokenizer.token_bytes(tokenizer.eos_token_id) == b"<eop>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
