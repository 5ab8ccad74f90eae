"""Models by name: which files are downloaded, cut transfers, and what a hub refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_multiuser.checkpoint import check_tensors, read_model_config
from glm_multiuser.checkpoint.hub import ATTEMPTS, download, is_name, local_path
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.model_config import AnyModelConfig
from tests.checkpoint.folders import QWEN2, arrays_of, write_folder, write_json, write_shards
from tests.checkpoint.hub_server import CHUNK, Hub, Refusal, Repository, environment, only_hub
from tests.server.process import ROOT

SMALL = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
}
OTHERS = (
    *("README.md", "modeling_tiny.py", "original/config.json", "consolidated.safetensors"),
    *("onnx/model.onnx", "tf_model.h5", "onnx/model.safetensors"),
)

CHILD = """
import sys
from glm_multiuser.checkpoint.hub import download
from glm_multiuser.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        print(download(name))
    except CheckpointError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def only() -> Iterator[Hub]:
    with tempfile.TemporaryDirectory() as folder, only_hub(Path(folder, "cache")) as hub:
        yield hub


@pytest.fixture
def hub(only: Hub) -> Hub:
    only.clear()
    return only


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of a small model, with what is not read, too."""
    folder = write_folder(tmp_path / "source", arrays_of(QWEN2))
    for name in (*SMALL, *OTHERS):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{{}} of {name}", encoding="utf-8")
    write_json(folder / "config.json", QWEN2)
    return folder


@pytest.fixture
def model(hub: Hub, source: Path) -> Repository:
    return hub.add("some-owner/Tiny-0.5B", source)


def test_only_the_files_that_are_read_and_those_once(hub: Hub, model: Repository) -> None:
    folder = download("some-owner/Tiny-0.5B")
    expected = {*SMALL, "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == hub.transferred() == expected
    assert len(hub.transfers) == len(expected)
    for name in expected:
        assert (folder / name).read_bytes() == model.files[name]
    check_tensors(folder, read_model_config(folder))
    assert download("some-owner/Tiny-0.5B") == folder
    assert len(hub.transfers) == len(expected)


def test_chat_templates_in_their_folder(hub: Hub, source: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("a")
    (source / "additional_chat_templates" / "notes.txt").write_text("b")
    hub.add("owner/templates", source)
    download("owner/templates")
    expected = {*SMALL, "model.safetensors", "additional_chat_templates/tool_use.jinja"}
    assert hub.transferred() == expected


def test_shards_and_their_index(hub: Hub, source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"?")
    hub.add("owner/shards", write_shards(source, arrays_of(QWEN2)))
    folder = download("owner/shards")
    shards = {f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)}
    assert hub.transferred() == {*SMALL, *shards, "model.safetensors.index.json"}
    check_tensors(folder, read_model_config(folder))


def test_shards_of_other_names(hub: Hub, source: Path) -> None:
    (source / "model.safetensors").unlink()
    write_shards(source, arrays_of(QWEN2))
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-", "model.safetensors-"))
    for file in source.glob("model-*"):
        file.rename(source / file.name.replace("model-", "model.safetensors-"))
    hub.add("owner/others", source)
    folder = download("owner/others")
    check_tensors(folder, read_model_config(folder))
    assert set(OTHERS).isdisjoint(hub.transferred())


def test_bin_where_there_is_no_safetensors(hub: Hub, source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    hub.add("owner/older", source)
    assert (download("owner/older") / "pytorch_model.bin").is_file()
    assert hub.transferred() == {*SMALL, "pytorch_model.bin"}


def test_a_cut_transfer_goes_on_where_it_stopped(hub: Hub, model: Repository) -> None:
    content = model.files["model.safetensors"]
    model.cuts["model.safetensors"] = [1000, 600, 300]
    folder = download("some-owner/Tiny-0.5B")
    assert (folder / "model.safetensors").read_bytes() == content
    begins = [begin for file, begin in hub.transfers if file == "model.safetensors"]
    assert begins == [0, 3 * CHUNK, 5 * CHUNK, 6 * CHUNK]


def test_what_arrived_before_an_error_is_there_the_next_time(hub: Hub, model: Repository) -> None:
    model.cuts["model.safetensors"] = [300] * ATTEMPTS
    with pytest.raises(CheckpointError, match=r"'some-owner/Tiny-0\.5B' is no path, and cannot"):
        download("some-owner/Tiny-0.5B")
    hub.transfers.clear()
    folder = download("some-owner/Tiny-0.5B")
    assert hub.transfers == [("model.safetensors", ATTEMPTS * CHUNK)]
    assert (folder / "model.safetensors").read_bytes() == model.files["model.safetensors"]


def test_a_model_that_was_renamed(hub: Hub, model: Repository) -> None:
    hub.repositories["some-owner/old"].moved_to = "some-owner/Tiny-0.5B"
    folder = download("some-owner/old")
    assert (folder / "model.safetensors").read_bytes() == model.files["model.safetensors"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tiny.Q4_0.gguf", {"tiny.Q4_0.gguf"}),
        (
            "Q8_0/tiny-00001-of-00002.gguf",
            {"Q8_0/tiny-00001-of-00002.gguf", "Q8_0/tiny-00002-of-00002.gguf"},
        ),
    ],
)
def test_one_gguf_file_with_all_its_parts(hub: Hub, file: str, expected: set[str]) -> None:
    names = {"tiny.Q4_0.gguf", "tiny.Q8_0.gguf", "Q8_0/tiny-00001-of-00003.gguf", *expected}
    hub.repositories["owner/Tiny-GGUF"].files = {name: name.encode() for name in names}
    path = download(f"owner/Tiny-GGUF/{file}")
    assert path.read_bytes() == file.encode()
    assert hub.transferred() == expected
    assert all((path.parent / Path(name).name).is_file() for name in expected)


def test_no_such_gguf_file(hub: Hub) -> None:
    hub.repositories["owner/Tiny-GGUF"].files = {"tiny.gguf": b"GGUF"}
    with pytest.raises(CheckpointError, match=r"'owner/Tiny-GGUF/no\.gguf': .* has no such file"):
        download("owner/Tiny-GGUF/no.gguf")
    with pytest.raises(CheckpointError, match=r"no config\.json; .* owner/Tiny-GGUF/file\.gguf"):
        download("owner/Tiny-GGUF")


def test_the_shape_is_checked_before_the_weights_are_downloaded(
    hub: Hub, model: Repository
) -> None:
    checked: list[AnyModelConfig] = []
    folder = download("some-owner/Tiny-0.5B", checked.append, weights=False)
    assert checked == [read_model_config(folder)]
    with pytest.raises(ConfigError, match="seq_length is 65; this model's max_sequence_length"):
        local_path("some-owner/Tiny-0.5B", EngineConfig(seq_length=65).check_fits)
    model.files["config.json"] = b'{"model_type": "unheard_of"}'
    with pytest.raises(CheckpointError, match="unheard_of"):
        download("some-owner/Tiny-0.5B")
    assert hub.transferred() == SMALL


def test_no_weights(hub: Hub, model: Repository) -> None:
    del model.files["model.safetensors"]
    with pytest.raises(
        CheckpointError, match=r"'some-owner/Tiny-0\.5B' has no weights: neither mod"
    ):
        download("some-owner/Tiny-0.5B")


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Refusal(404, "RepoNotFound"), r"there is no such model \(HTTP 404\)"),
        (
            Refusal(401, "RepoNotFound"),
            r"access is denied \(HTTP 401\)\. There is no such model, or",
        ),
        (Refusal(403, "GatedRepo"), r"denied \(HTTP 403\).* private or gated: .* set HF_TOKEN"),
        (Refusal(403, "GatedRepo", files_only=True), r"denied \(HTTP 403\).* private or gated"),
        (Refusal(500), "An error happened while trying to locate the files on the Hub"),
    ],
)
def test_what_a_hub_refuses(hub: Hub, model: Repository, refusal: Refusal, reason: str) -> None:
    model.refusal = refusal
    message = f"^model 'some-owner/Tiny-0.5B' is no path, .* from Hugging Face: .*{reason}.*$"
    with pytest.raises(CheckpointError, match=message):
        download("some-owner/Tiny-0.5B")


def test_nobody_answers(hub: Hub, model: Repository) -> None:
    hub.is_down = True
    with pytest.raises(
        CheckpointError, match=r"'some-owner/Tiny-0\.5B' is no path, and cannot be do"
    ):
        download("some-owner/Tiny-0.5B")


def test_the_variables_of_hugging_face_and_no_network(
    hub: Hub, model: Repository, tmp_path: Path
) -> None:
    def download_in_child(*names: str, **variables: str) -> list[str]:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, *names],
            env={**os.environ, **environment(hub.url, tmp_path / "other"), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        return child.stdout.splitlines()

    (folder,) = download_in_child("some-owner/Tiny-0.5B")  # and no bars, which are for terminals
    assert (tmp_path / "other" / "huggingface") in Path(folder).parents
    assert hub.transferred() == {*SMALL, "model.safetensors"}
    hub.requests.clear()
    names = ("some-owner/Tiny-0.5B", "owner/name")
    (same, error) = download_in_child(*names, HF_HUB_OFFLINE="1")
    assert same == folder
    assert error.startswith("model 'owner/name' is no path, and cannot be downloaded from Hugging")
    assert "HF_HUB_OFFLINE=0" in error
    assert hub.requests == []


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_without_the_extra(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("huggingface_hub", "modelscope", "modelscope.hub.snapshot_download"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        CheckpointError,
        match=r"install (huggingface_hub|modelscope)\S* with pip ins"
        r"tall 'glm-multiuser\[hub\]'",
    ):
        local_path(f"{prefix}owner/name")


@pytest.mark.parametrize(
    "place",
    [
        *("Qwen/Qwen2.5-0.5B-Instruct", "a/b", "modelscope:Qwen/Qwen3-8B", "01-ai/Yi-6B"),
        *("HuggingFaceTB/SmolLM2-135M-Instruct-GGUF/smollm2.Q4_1.gguf", "a/b/Q4/c-00001.gguf"),
        "modelscope:a/b/c.gguf",
    ],
)
def test_names(place: str) -> None:
    assert is_name(place)
    assert is_name(Path(place))


@pytest.mark.parametrize(
    "place",
    [
        *("", "name", "a/b/c", "/a/b", "./a/b", "../a", "../../a/b", "~/model", "a/../b.gguf"),
        *("a/b/", "a//b", "models/tiny.gguf", "tiny.gguf", "hf:a/b", "a/b/c.safetensors", "a b/c"),
        *("a/b\n", "a/模型", "a/" + 5000 * "b" + "/c", "a/b@main", "modelscope:name"),
    ],
)
def test_no_names(place: str) -> None:
    assert not is_name(place)


def test_a_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_name("owner/name")
    assert local_path("owner/name") == Path("owner/name")


def test_modelscope(hub: Hub, model: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("modelscope.hub.file_download")
    # Before 1.38, whole chunks are kept; from then on, everything.
    monkeypatch.setattr(client, "API_FILE_DOWNLOAD_CHUNK_SIZE", CHUNK, raising=False)
    model.cuts["model.safetensors"] = [1000]
    folder = download("modelscope:some-owner/Tiny-0.5B")
    assert hub.transferred() == {*SMALL, "model.safetensors"}
    begins = [begin for file, begin in hub.transfers if file == "model.safetensors"]
    assert begins[0] == 0 < begins[1] <= 1000
    assert (folder / "model.safetensors").read_bytes() == model.files["model.safetensors"]
    check_tensors(folder, read_model_config(folder))
    with pytest.raises(CheckpointError, match=r"'modelscope:a/b' .* from ModelScope: there is no"):
        download("modelscope:a/b")
