"""MindFormers' `.ckpt` files: read like any checkpoint, and written for MindFormers to load."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Optional

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore.train import serialization
from mindspore.train.checkpoint_pb2 import Checkpoint
from safetensors.numpy import load_file

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.checkpoint import (
    load_checkpoint,
    read_model_config,
    write_huggingface,
    write_mindformers,
)
from glm_multiuser.checkpoint.ckpt_file import open_ckpt, save_ckpt
from glm_multiuser.checkpoint.convert import HUGGINGFACE, MINDFORMERS, convert
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.checkpoint.matching import NO_WEIGHT_OF_MINDFORMERS
from glm_multiuser.checkpoint.mindformers_arguments import glm_config_arguments
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.model_config import ModelConfig
from tests.checkpoint.folders import (
    CONFIG,
    MODEL,
    Array,
    our_shapes,
    refused,
    same,
    their_arrays,
    write_folder,
    write_json,
)

GLM_TINY = Path(__file__).resolve().parents[2] / "ckpt" / "glm-tiny"
QKV = "transformer.layers.1.attention.query_key_value"


def mindformers_arrays(dtype: str = "float32") -> dict[str, Array]:
    """`their_arrays` under MindFormers' names, which are ours."""
    return dict(zip(our_shapes(), their_arrays(dtype=dtype).values()))


def write_ckpt(path: Path, arrays: dict[str, Any], **options: Any) -> Path:
    """What MindSpore writes; the values are arrays or Tensors."""

    def save() -> None:
        tensors = [
            {"name": name, "data": mindspore.Tensor(one) if isinstance(one, np.ndarray) else one}
            for name, one in arrays.items()
        ]
        mindspore.save_checkpoint(tensors, str(path), **options)

    path.parent.mkdir(parents=True, exist_ok=True)
    DEVICE_THREAD.call(save)
    path.chmod(0o644)
    return path


def read_ckpt(path: Path) -> dict[str, Array]:
    """What MindSpore reads; texts are left out."""

    def read() -> dict[str, Array]:
        found = mindspore.load_checkpoint(str(path))
        return {name: one.asnumpy() for name, one in found.items() if not isinstance(one, str)}

    return DEVICE_THREAD.call(read)


def load(folder: Path, dtype: str = "float32") -> dict[str, Array]:
    loaded: dict[str, Array] = {}
    parameters = {name: (shape, np.dtype(dtype)) for name, shape in our_shapes().items()}
    load_checkpoint(folder, MODEL, parameters, loaded.__setitem__)
    assert loaded.keys() == parameters.keys()
    return loaded


# Reading


@pytest.mark.parametrize("wanted", ["float16", "float32"])
@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
def test_loads_the_same_as_from_safetensors(tmp_path: Path, stored: str, wanted: str) -> None:
    write_ckpt(tmp_path / "ckpt" / "glm_6b.ckpt", mindformers_arrays(stored))
    write_folder(tmp_path / "safetensors", their_arrays(dtype=stored))
    assert same(load(tmp_path / "ckpt", wanted), load(tmp_path / "safetensors", wanted))


def test_shapes_are_those_of_the_model() -> None:
    assert parameter_shapes(MODEL) == our_shapes()


def test_what_mindspore_wrote_is_read_as_mindspore_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "SLICE_SIZE", 1)  # so 1024 bytes a part, not half a GB
    random = np.random.default_rng(3)
    arrays = {
        "in.parts": random.standard_normal((37, 29)).astype("f4"),
        "exactly.two.parts": random.standard_normal(1024).astype("f2"),
        "small": random.standard_normal((2, 3, 4)),
        "scalar": np.array(2.5, np.float32),
    }
    path = write_ckpt(
        tmp_path / "some.ckpt", arrays, crc_check=True, append_dict={"text": "你好", "step": 3.5}
    )
    tensors = open_ckpt([path], NO_WEIGHT_OF_MINDFORMERS)
    assert len(tensors["in.parts"].parts) == 5
    assert len(tensors["exactly.two.parts"].parts) == 2
    found = {name: tensor.read() for name, tensor in tensors.items()}
    assert same(found, read_ckpt(path))
    assert found.keys() == {*arrays, "step"}


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.0, 3.140625, np.inf, 1e-40, 3e38], np.float32)
    tensor = DEVICE_THREAD.call(lambda: mindspore.Tensor(values, mindspore.bfloat16))
    path = write_ckpt(tmp_path / "some.ckpt", {"w": tensor})
    found = open_ckpt([path], NO_WEIGHT_OF_MINDFORMERS)["w"].read()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, read_ckpt(path)["w"].astype(np.float32))


@pytest.mark.parametrize(
    "name",
    [
        "transformer.layers.0.key_past",
        "transformer.layers.0.value_past",
        "transformer.layers.1.attention.k_past",
        "transformer.layers.1.kv_past.3.value_past",
        "transformer.layers.1.attention.rotary_emb.inv_freq",
        "adam_m.transformer.layers.0.mlp.dense_h_to_4h.weight",
        "adam_v.lm_head.weight",
        "accu_grads.transformer.final_layernorm.beta",
        "global_step",
        "learning_rate",
        "current_iterator_step",
        "scale_sense",
    ],
)
def test_what_is_no_weight_is_ignored(tmp_path: Path, name: str) -> None:
    arrays = mindformers_arrays()
    for extra in (np.ones(3, np.float32), np.array(7, np.int32)):
        write_ckpt(tmp_path / "glm.ckpt", {name: extra, **arrays}, append_dict={"epoch_num": 2})
        head = load(tmp_path)["lm_head.weight"]
        np.testing.assert_array_equal(head, arrays["lm_head.weight"])


@pytest.mark.parametrize(
    "name",
    [
        "transformer.layers.0.attention.query_key_value.mindpet_delta_lora_a",
        "transformer.layers.2.attention.dense.bias",
        "prefix_encoder.embedding.weight",
        "passed",
    ],
)
def test_superfluous_tensor(tmp_path: Path, name: str) -> None:
    write_ckpt(tmp_path / "glm.ckpt", {**mindformers_arrays(), name: np.ones((2, 4), np.float32)})
    refused(tmp_path, rf"{name} \[2, 4\] in .*glm\.ckpt has no place in this model")


def test_missing_tensor(tmp_path: Path) -> None:
    arrays = mindformers_arrays()
    del arrays["transformer.word_embeddings.embedding_table"]
    write_ckpt(tmp_path / "glm.ckpt", arrays)
    refused(tmp_path, r"lacks transformer\.word_embeddings\.embedding_table, .* \[11, 8\].*: 1")


def test_misshapen_tensor(tmp_path: Path) -> None:
    arrays = mindformers_arrays()
    arrays[f"{QKV}.weight"] = arrays[f"{QKV}.weight"].T.copy()
    write_ckpt(tmp_path / "glm.ckpt", arrays)
    refused(tmp_path, rf"{QKV}.weight in .* has shape \[8, 24\]; this model needs \[24, 8\]")


def test_whole_numbers_are_refused(tmp_path: Path) -> None:
    write_ckpt(tmp_path / "glm.ckpt", {"lm_head.weight": np.ones((11, 8), np.int8)})
    refused(tmp_path, r"lm_head.weight in .*glm\.ckpt is stored as Int8")


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    arrays = mindformers_arrays()
    arrays[f"{QKV}.bias"][3] = 70_000.0
    write_ckpt(tmp_path / "glm.ckpt", arrays)
    assert load(tmp_path)[f"{QKV}.bias"].max() == 70_000.0
    with pytest.raises(CheckpointError, match=f"{QKV}.bias in .* beyond the range of float16"):
        load(tmp_path, "float16")


def test_pieces_that_together_are_a_checkpoint(tmp_path: Path) -> None:
    arrays = mindformers_arrays()
    write_ckpt(tmp_path / "whole" / "glm.ckpt", arrays)
    names = list(arrays)
    for piece in range(3):
        part = {name: arrays[name] for name in names[piece::3]}
        cache = {"transformer.layers.0.key_past": np.zeros(2, np.float32)}
        write_ckpt(tmp_path / "pieces" / f"glm_{piece}.ckpt", {**cache, **part})
    assert same(load(tmp_path / "pieces"), load(tmp_path / "whole"))


def test_two_checkpoints_in_one_folder(tmp_path: Path) -> None:
    for step in (1, 2):
        write_ckpt(tmp_path / f"glm_{step}.ckpt", mindformers_arrays())
    refused(tmp_path, r"is both in .*glm_1\.ckpt and in .*glm_2\.ckpt")


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    write_folder(tmp_path, their_arrays())
    (tmp_path / "glm.ckpt").write_bytes(b"nobody looks at this")
    load(tmp_path)


def broken(tmp_path: Path, change: Callable[[Any], None]) -> Path:
    """A checkpoint whose protobuf message was changed; the field that is spoilt may be missing."""
    path = write_ckpt(tmp_path / "glm.ckpt", mindformers_arrays())
    message = Checkpoint()
    message.ParseFromString(path.read_bytes())
    change(message.value[2])
    path.write_bytes(message.SerializePartialToString())
    return tmp_path


def shorten(value: Any) -> None:
    value.tensor.tensor_content = value.tensor.tensor_content[:-4]


def lengthen(value: Any) -> None:
    value.tensor.tensor_content *= 3


def shrink(value: Any) -> None:
    value.tensor.dims[0] = -2


@pytest.mark.parametrize("change", [shorten, lengthen, shrink])
def test_content_that_does_not_fill_the_shape(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    """MindSpore's own loader fills up with zeros, or writes where it must not."""
    refused(broken(tmp_path, change), r"layernorm.beta in .*glm\.ckpt has \d+ bytes; its shape")


@pytest.mark.parametrize(("field", "number"), [("tensor_type", 2), ("tensor_content", 3)])
def test_missing_field(tmp_path: Path, field: str, number: int) -> None:
    folder = broken(tmp_path, lambda value: value.tensor.ClearField(field))
    refused(folder, rf"glm\.ckpt is broken, cut short, .*: field {number} is missing")


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"crc_num", b"\x08\x01", b"\xff" * 100, b"\n\x05\n\x03abc", b"version https://"],
)
def test_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "glm.ckpt").write_bytes(content)
    refused(tmp_path, r"glm\.ckpt is broken, cut short, encrypted or not a MindSpore checkpoint: .")


@settings(deadline=None)
@given(data=st.data())
def test_damage_is_noticed_or_harmless(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    original = write_ckpt(folder / "glm.ckpt", {"lm_head.weight": np.ones((3, 2), np.float32)})
    content = bytearray(original.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] = data.draw(st.integers(0, 255))
    else:
        del content[place:]
    original.write_bytes(content)
    try:
        tensors = open_ckpt([original], NO_WEIGHT_OF_MINDFORMERS)
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert tensor.read().shape == tensor.shape


def test_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "glm.ckpt").mkdir()
    refused(tmp_path, r"cannot read .*glm\.ckpt: Is a directory")


def test_a_yaml_cannot_stand_in_for_config_json(tmp_path: Path) -> None:
    write_ckpt(tmp_path / "glm.ckpt", mindformers_arrays())
    (tmp_path / "run_glm_6b.yaml").write_text("model: {}")
    with pytest.raises(CheckpointError, match=r"config\.json: .*a yaml of MindFormers cannot"):
        read_model_config(tmp_path)


def test_the_same_answers_as_from_safetensors(tmp_path: Path) -> None:
    ids = {"mask_token_id": 5, "gmask_token_id": 6, "bos_token_id": 7, "eos_token_id": 8}
    answers = []
    for kind in ("safetensors", "ckpt"):
        folder = tmp_path / kind
        if kind == "ckpt":
            write_ckpt(folder / "glm_6b.ckpt", mindformers_arrays())
        else:
            write_folder(folder, their_arrays())
        write_json(folder / "config.json", {**CONFIG, **ids})
        with MultiUserLLM.from_pretrained(folder, users=1, seq_length=16) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            answers.append(llm.generate([[1, 2, 3, 6, 7]], params)[0].token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


# Writing


def test_mindspore_reads_what_is_written(tmp_path: Path) -> None:
    arrays = {name: one.T if one.ndim == 2 else one for name, one in mindformers_arrays().items()}
    path = tmp_path / "some.ckpt"
    save_ckpt(path, arrays.items())
    assert same(read_ckpt(path), {name: np.ascontiguousarray(one) for name, one in arrays.items()})
    assert [one.name for one in tmp_path.iterdir()] == ["some.ckpt"]
    assert path.stat().st_mode & 0o200


def test_our_arrays_become_mindformers_folder(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    ours = {name: random.standard_normal(shape, "f4") for name, shape in our_shapes().items()}
    write_mindformers(tmp_path / "new", CONFIG, ours)
    assert ModelConfig.from_folder(tmp_path / "new") == MODEL
    assert same(load(tmp_path / "new"), ours)
    write_huggingface(tmp_path / "other", CONFIG, ours)
    assert same(load(tmp_path / "other"), ours)


def test_writing_needs_exactly_the_weights(tmp_path: Path) -> None:
    ours = {name: np.ones(shape, "f4") for name, shape in our_shapes().items()}
    cache = {"transformer.layers.0.key_past": np.ones(1)}
    with pytest.raises(CheckpointError, match=r"layers.0.key_past is missing, or is no weight"):
        write_mindformers(tmp_path / "new", CONFIG, {**ours, **cache})
    assert list(tmp_path.iterdir()) == []


def test_failed_writing_leaves_the_old_weights(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    save_ckpt(path, [("w", np.ones(3, np.float32))])
    before = path.read_bytes()

    def half() -> Any:
        yield "w", np.zeros(3, np.float32)
        raise CheckpointError("the second tensor cannot be read")

    with pytest.raises(CheckpointError, match="second"):
        save_ckpt(path, half())
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["some.ckpt"]


# Converting


def convert_quietly(
    source: Path,
    destination: Path,
    to: str,
    dtype: Optional[str] = None,
    config_file: Optional[Path] = None,
) -> Path:
    convert(source, destination, to, dtype, config_file, False, lambda done, total, what: None)
    return destination


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_there_and_back_keeps_every_bit(tmp_path: Path, dtype: str) -> None:
    arrays = their_arrays(dtype=dtype)
    write_json(write_folder(tmp_path / "old", arrays) / "config.json", CONFIG)
    between = convert_quietly(tmp_path / "old", tmp_path / "between", MINDFORMERS)
    assert same(read_ckpt(between / "model.ckpt"), mindformers_arrays(dtype))
    new = convert_quietly(between, tmp_path / "new", HUGGINGFACE)
    assert same(load_file(new / "model.safetensors"), arrays)
    assert json.loads((new / "config.json").read_text()) == CONFIG
    assert len({path.stat().st_mode for path in (*between.iterdir(), *new.iterdir())}) == 1


def test_glm_tiny_there_and_back(tmp_path: Path) -> None:
    between = convert_quietly(GLM_TINY, tmp_path / "between", MINDFORMERS)
    new = convert_quietly(between, tmp_path / "new", HUGGINGFACE)
    for path in GLM_TINY.iterdir():
        if path.name != "README.md":
            assert (new / path.name).read_bytes() == path.read_bytes()


def test_caches_are_left_out_and_pieces_become_one(tmp_path: Path) -> None:
    arrays = mindformers_arrays()
    cache = {"transformer.layers.0.key_past": np.zeros(2, np.float32)}
    head = {"lm_head.weight": arrays.pop("lm_head.weight")}
    write_ckpt(tmp_path / "old" / "one.ckpt", {**cache, **arrays})
    write_ckpt(tmp_path / "old" / "two.ckpt", {**cache, **head})
    write_json(tmp_path / "old" / "config.json", CONFIG)
    new = convert_quietly(tmp_path / "old", tmp_path / "new", HUGGINGFACE)
    assert same(load_file(new / "model.safetensors"), their_arrays())


@pytest.mark.parametrize("to", [MINDFORMERS, HUGGINGFACE])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype(tmp_path: Path, to: str, dtype: str) -> None:
    old = tmp_path / "old"
    if to == MINDFORMERS:
        write_folder(old, their_arrays(dtype="float64"))
    else:
        write_ckpt(old / "glm.ckpt", mindformers_arrays(dtype="float64"))
    write_json(old / "config.json", {**CONFIG, "torch_dtype": "float64"})
    new = convert_quietly(old, tmp_path / "new", to, dtype)
    assert same(load(new, dtype), load(old, dtype))
    assert json.loads((new / "config.json").read_text())["torch_dtype"] == dtype
    if to == MINDFORMERS:
        assert {one.dtype.name for one in read_ckpt(new / "model.ckpt").values()} == {dtype}
        arguments = json.loads((new / "mindformers_config.json").read_text())
        assert arguments == glm_config_arguments(MODEL, 512, dtype)
    else:
        written = load_file(new / "model.safetensors")
        assert {one.dtype.name for one in written.values()} == {dtype}


def test_dtype_that_is_too_small_leaves_nothing(tmp_path: Path) -> None:
    arrays = their_arrays()
    arrays[f"{QKV}.bias"][3] = 70_000.0
    write_json(write_folder(tmp_path / "old", arrays) / "config.json", CONFIG)
    with pytest.raises(CheckpointError, match=f"{QKV}.bias in .* beyond the range of float16"):
        convert_quietly(tmp_path / "old", tmp_path / "new", MINDFORMERS, "float16")
    assert [one.name for one in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("to", [MINDFORMERS, HUGGINGFACE])
def test_progress_counts_the_tensors(tmp_path: Path, to: str) -> None:
    old = write_folder(tmp_path / "old", their_arrays())
    write_ckpt(old / "glm.ckpt", mindformers_arrays())
    write_json(old / "config.json", CONFIG)
    seen: list[int] = []
    convert(old, tmp_path / "new", to, None, None, False, lambda done, *_: seen.append(done))
    assert seen[: len(our_shapes())] == list(range(len(our_shapes())))


# MindFormers itself


def test_arguments_of_a_model_that_mindformers_cannot_compute() -> None:
    for number in (None, 2):
        config = ModelConfig.from_dict({**CONFIG, "deepnorm_layers": number})
        assert glm_config_arguments(config, 16, "float16")["num_heads"] == 2
    config = ModelConfig.from_dict({**CONFIG, "deepnorm_layers": 28})
    with pytest.raises(ConfigError, match="deepnorm_layers is 28 and num_layers 2"):
        glm_config_arguments(config, 16, "float16")


@pytest.mark.parametrize(
    ("seq_length", "dtype", "message"),
    [(0, "float32", "seq_length is 0"), (2049, "float32", "2048"), (8, "int8", "dtype is 'int8'")],
)
def test_arguments_out_of_range(seq_length: int, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        glm_config_arguments(MODEL, seq_length, dtype)


IN_MINDFORMERS = """
import json, sys
from pathlib import Path
import mindspore
import numpy as np
from mindformers import GLMChatModel, GLMConfig
from safetensors.numpy import load_file

def theirs(name):
    word = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}
    *path, last = name.split(".")
    return ".".join([*path, word.get(last, last)])

old, *new_folders = map(Path, sys.argv[1:])
results = []
for new in new_folders:
    config = GLMConfig(**json.loads((new / "mindformers_config.json").read_text()))
    model = GLMChatModel(config)
    parameters = mindspore.load_checkpoint(str(new / "model.ckpt"))
    not_loaded, not_known = mindspore.load_param_into_net(model, parameters)
    expected = load_file(old / "model.safetensors")
    unequal = []
    for name, parameter in model.parameters_dict().items():
        values = parameter.asnumpy()
        if name not in not_loaded and not np.array_equal(
            values, expected.pop(theirs(name)).astype(values.dtype)
        ):
            unequal.append(name)
    settings = [str(config.compute_dtype), config.num_heads, config.gmask_token_id, config.use_past]
    results.append([not_loaded, not_known, unequal, list(expected), settings])
print(json.dumps(results))
"""


@pytest.mark.skipif(find_spec("mindformers") is None, reason="MindFormers is not installed")
def test_mindformers_loads_it(tmp_path: Path) -> None:
    """The names, shapes and rows that its own GLM asks for; that code is not of this project."""
    dtypes = ("float16", "float32")
    new = [convert_quietly(GLM_TINY, tmp_path / one, MINDFORMERS, one) for one in dtypes]
    child = subprocess.run(
        [sys.executable, "-c", IN_MINDFORMERS, str(GLM_TINY), *map(str, new)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert child.returncode == 0, child.stderr
    caches = [
        f"transformer.layers.{layer}.{one}_past" for layer in range(4) for one in ("key", "value")
    ]
    for dtype, result in zip(dtypes, json.loads(child.stdout.splitlines()[-1])):
        not_loaded, not_known, unequal, left_over, found = result
        assert sorted(not_loaded) == caches
        assert not_known == unequal == left_over == []
        assert found == [dtype.capitalize(), 4, 5, True]
