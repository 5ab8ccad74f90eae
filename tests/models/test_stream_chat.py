"""The low-level chat: plain threads, one model, each thread a user of its own."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from glm_multiuser import device
from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.errors import ConfigError, InvalidParameterError, PromptTooLongError
from glm_multiuser.mindformers.glm_for_multi_user import GLMForMultiUser
from glm_multiuser.model_config import ModelConfig
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from glm_multiuser.weights import load_weights, weights_of
from tests.golden_data import golden_folder
from tests.models.golden_cases import read_reference, worst
from tests.models.test_stream_chat_ends import Recorder

USERS, NEW = 4, 8


def make_model(folder: Path, layout: CellLayout) -> GLMForMultiUser:
    def make() -> GLMForMultiUser:
        device.configure("CPU", 0)
        config = ModelConfig.from_folder(folder)
        model = GLMForMultiUser(config, layout=layout)
        model.set_train(False)
        weights = {name: one for name, one in weights_of(model).items() if "past" not in name}
        load_weights(folder, config)(weights, lambda done, total, what: None)
        return model

    return DEVICE_THREAD.call(make)


@pytest.fixture(scope="module")
def folder() -> Path:
    return golden_folder("e2e_chatglm_6b", "model.safetensors", "expected.json", "ice_text.model")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[dict[str, Any]]:
    """Short prompts that are padded to the same length."""
    cases = json.loads((folder / "expected.json").read_text("utf-8"))["single"]
    short = [case for case in cases if 16 < len(case["input_ids"]) <= 26]
    assert len(short) == 3
    return short


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    found = load_tokenizer(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> GLMForMultiUser:
    """28 layers, whose graphs compile for long: one for prompts and one for steps."""
    return make_model(folder, CellLayout.plan(USERS, 26 + NEW))


@pytest.mark.parametrize(
    "lock", [pytest.param(threading.Lock(), marks=pytest.mark.rare), None], ids=["lock", "no lock"]
)
def test_four_threads(
    model: GLMForMultiUser,
    tokenizer: ChatTokenizer,
    cases: list[dict[str, Any]],
    lock: Optional[threading.Lock],
) -> None:
    """Each thread has two conversations; the second finds what other cases left in its slot."""
    together = threading.Barrier(USERS)

    def talk(user: int) -> None:
        together.wait(timeout=60)
        for case in (cases[user % 3], cases[(user + 1) % 3]):
            prompt = tokenizer.encode_prompt(case["query"], case["history"])
            recorder = Recorder()
            pieces = model._stream_chat(
                [prompt],
                top_k=1,
                top_p=1.0,
                repetition_penalty=1.0,
                max_length=len(prompt) + NEW,
                eos_token_id=model.config.eos_token_id,
                streamer=recorder,
                tokenizer=tokenizer,
                tlock=lock,
                qi=user,
            )
            text = "".join(pieces)
            assert recorder.token_ids == case["output_ids"][:NEW]
            assert recorder.ends == 1
            assert text == tokenizer.decode(recorder.token_ids)
            assert text
            # The last character may be cut off in the middle.
            assert case["raw_decoded"].startswith(text.rstrip("\ufffd"))

    with ThreadPoolExecutor(USERS) as threads:
        for talking in [threads.submit(talk, user) for user in range(USERS)]:
            talking.result()


def test_end_token_ends_the_answer(
    model: GLMForMultiUser, tokenizer: ChatTokenizer, cases: list[dict[str, Any]]
) -> None:
    case = cases[0]
    end = case["output_ids"][3]
    assert end not in case["output_ids"][:3]
    for eos_token_id in (end, [1, end]):
        recorder = Recorder()
        pieces = model._stream_chat(
            np.array(case["input_ids"]),
            1,
            1.0,
            1.0,
            len(case["input_ids"]) + NEW,
            eos_token_id,
            streamer=recorder,
            tokenizer=tokenizer,
        )
        assert "".join(pieces) == tokenizer.decode(case["output_ids"][:3])
        assert recorder.token_ids == case["output_ids"][:3]
        assert recorder.ends == 1


@pytest.fixture(scope="module")
def small() -> GLMForMultiUser:
    folder = read_reference("chatglm_6b_3layers").folder
    return make_model(folder, CellLayout.plan(3, 24, 16, users_per_cell=2))


def test_a_user_is_an_int_or_a_tensor(small: GLMForMultiUser) -> None:
    case = {case.name: case for case in read_reference("chatglm_6b_3layers").short}["len5"]
    for user in (2, Tensor(2, ms.int32)):
        token_ids = list(case.token_ids)
        logits = small._incremental_infer(token_ids, len(token_ids) - 1, True, user=user)
        assert logits.dtype == np.float32
        assert worst(logits[0], case.last_logits("fp32")) <= case.tolerance
        for step in range(1, 12):
            token_ids.append(int(logits[0].argmax()))
            logits = small._incremental_infer(token_ids, len(token_ids) - 1, False, user=user)
            assert int(logits[0].argmax()) == case.greedy["fp32"][step]


def test_a_token_that_is_not_the_next_one_is_rejected(small: GLMForMultiUser) -> None:
    token_ids, user = [5, 6, 7, 8], Tensor(2, ms.int32)
    small._incremental_infer(token_ids, 1, True, user)
    small._incremental_infer(token_ids, 2, False, user)
    expected = small._incremental_infer(token_ids, 3, False, user)
    with pytest.raises(InvalidParameterError, match="current_index is 3; user 2 has 4 cached"):
        small._incremental_infer(token_ids, 3, False, user)
    small._incremental_infer(token_ids, 1, True, user)
    with pytest.raises(InvalidParameterError, match="current_index is 3; user 2 has 2 cached"):
        small._incremental_infer(token_ids, 3, False, user)
    small._incremental_infer(token_ids, 2, False, user)
    assert (small._incremental_infer(token_ids, 3, False, user) == expected).all()
    for index, first in ((-1, True), (4, True), (4, False)):
        with pytest.raises(InvalidParameterError, match=f"current_index is {index}; .* 4 tokens"):
            small._incremental_infer(token_ids, index, first, user)


def test_more_users_at_run_time(small: GLMForMultiUser) -> None:
    token_ids, last = [5, 6, 7], Tensor(4, ms.int32)
    expected = small._incremental_infer(token_ids, 1, True, Tensor(2, ms.int32))
    DEVICE_THREAD.call(lambda: small.set_layout(CellLayout.plan(5, 24, 16)))
    with pytest.raises(InvalidParameterError, match="user 2 has 0 cached tokens"):
        small._incremental_infer(token_ids, 2, False, Tensor(2, ms.int32))
    logits = small._incremental_infer(token_ids, 1, True, last)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_graph_that_failed_is_compiled_again(small: GLMForMultiUser) -> None:
    def fail() -> None:
        inputs = [np.zeros(16), np.zeros((2, 16)), np.ones((1, 2)), np.array(99)]
        small(*(Tensor(values, ms.int32) for values in inputs), 0)[2].asnumpy()

    user = Tensor(2, ms.int32)
    expected = small._incremental_infer([5, 6], 1, True, user)
    with pytest.raises((RuntimeError, IndexError), match="ind"):
        DEVICE_THREAD.call(fail)
    with pytest.raises(RuntimeError, match="previous step"):
        small._incremental_infer([5, 6], 1, True, user)
    assert (small._incremental_infer([5, 6], 1, True, user) == expected).all()


def test_a_model_without_caches_cannot_chat(folder: Path, tokenizer: ChatTokenizer) -> None:
    model = DEVICE_THREAD.call(lambda: GLMForMultiUser(ModelConfig.from_folder(folder)))
    with pytest.raises(ConfigError, match="layout has 0 users"):
        model._incremental_infer([5, 6], 1, True)
    with pytest.raises(ConfigError, match="layout has 0 users"):
        list(model._stream_chat([5, 6], 1, 1.0, 1.0, 8, 9, tokenizer=tokenizer))


def test_too_long_a_sequence(small: GLMForMultiUser) -> None:
    with pytest.raises(PromptTooLongError, match=r"25 tokens; .* hold 24"):
        small._incremental_infer([5] * 25, 24, True)


@pytest.mark.parametrize("token_id", [-1, 1 << 20])
def test_a_token_id_out_of_range_is_rejected(small: GLMForMultiUser, token_id: int) -> None:
    with pytest.raises(InvalidParameterError, match=rf"prompt\[1\] is {token_id}; token ids are"):
        small._incremental_infer([1, token_id], 1, True)


def test_no_tokenizer(small: GLMForMultiUser) -> None:
    with pytest.raises(InvalidParameterError, match="tokenizer is None"):
        next(small._stream_chat([5, 6], 1, 1.0, 1.0, 8, 9))


@pytest.mark.parametrize("user", [-1, 3, 7])
def test_a_user_out_of_range_is_refused(user: int) -> None:
    config = ModelConfig(
        vocab_size=32, hidden_size=16, num_layers=1, num_attention_heads=2, inner_hidden_size=32
    )
    model = GLMForMultiUser(config, layout=CellLayout.plan(3, 32, users_per_cell=1))
    for index in (user, Tensor(user)):
        with pytest.raises(InvalidParameterError, match=rf"user is {user}; .* are 0 to 2"):
            model._incremental_infer([5, 6], 1, True, user=index)


@pytest.mark.parametrize("user", [1.5, "1", None, Tensor(1.5), Tensor([0, 1])], ids=str)
def test_a_user_is_a_whole_number(small: GLMForMultiUser, user: object) -> None:
    message = f"user is {user!r}; it must be an int"
    with pytest.raises(InvalidParameterError, match=re.escape(message)):
        small._incremental_infer([5, 6], 1, True, user=user)


@pytest.mark.rare
def test_a_tensor_user_may_be_of_any_integer_type(tokenizer: ChatTokenizer) -> None:
    config = ModelConfig(
        vocab_size=32, hidden_size=16, num_layers=1, num_attention_heads=2, inner_hidden_size=32
    )
    model = GLMForMultiUser(config, layout=CellLayout.plan(3, 32, users_per_cell=1))
    model.set_train(False)
    wide = model._incremental_infer([5, 6], 1, True, user=Tensor(2))  # int64
    narrow = model._incremental_infer([5, 6], 1, True, user=Tensor(2, ms.int32))
    assert (wide == narrow).all()
