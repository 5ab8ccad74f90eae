"""Packed weights on disk: mapped at the next start, and never believed without a look."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from glm_multiuser import ConfigError, MultiUserLLM, SamplingParams, weight_cache
from glm_multiuser.backends.native import library
from glm_multiuser.checkpoint.matching import MatchedParameter
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.mindspore_internals import memory_of
from glm_multiuser.weight_cache import WeightCache, cache_folder
from tests.checkpoint.test_quantised_folder import folders
from tests.golden_data import golden_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(library.unavailable_reason("CPU")), reason="no native kernels"),
]

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
PROMPT = [5, 80, 33, 7, 61]
REMAINS = "0123456789abcdef-1234abc_.part"


def nothing(done: int, total: int, what: str) -> None:
    """Of progress."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint that a test may change."""
    new = tmp_path / "model"
    new.mkdir()
    golden = golden_folder("llama", "model.safetensors")
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(golden / name, new / name)
    return new


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters that were read from a checkpoint."""
    names: list[str] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(matched: MatchedParameter, *arguments: Any) -> Any:
            names.append(matched.name)
            return function(matched, *arguments)

        return note

    for name in ("read", "rows"):
        monkeypatch.setattr(MatchedParameter, name, noted(getattr(MatchedParameter, name)))
    return names


def answer(folder: Path, kept: Path, **settings: Any) -> tuple[list[int], list[Any]]:
    """Tokens and their log-probabilities; when it returns, weights are on disk."""
    settings = {"users": 1, "seq_length": 32, "weight_cache": str(kept), **settings}
    with MultiUserLLM.from_pretrained(folder, **settings) as llm:
        result = llm.submit(PROMPT, params=replace(GREEDY, logprobs=1)).result()
    return list(result.token_ids), [one.logprob for one in result.logprobs or ()]


def files(kept: Path) -> list[Path]:
    return sorted(kept.iterdir())


def test_the_second_start_reads_no_tensor_and_answers_alike(
    folder: Path, kept: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(folder, kept)
    assert reads
    (path,) = files(kept)
    assert path.name.startswith("model-")
    assert path.suffix == ".safetensors"
    assert path.stat().st_mode & 0o077 == 0
    reads.clear()
    caplog.set_level(logging.INFO, "glm_multiuser.weight_cache")
    assert answer(folder, kept) == expected
    assert reads == []
    assert caplog.messages == [f"packed weights are mapped from {path}"]
    assert answer(folder, kept, weight_cache="off") == expected


def test_the_file_is_one_that_others_can_read(folder: Path, kept: Path) -> None:
    answer(folder, kept)
    (path,) = files(kept)
    stored = load_file(path)
    values = load_file(folder / "model.safetensors")
    (name,) = (one for one in stored if one.endswith("final_layernorm.weight"))
    assert np.array_equal(stored[name], values["model.norm.weight"])


def test_parameters_are_the_mapped_pages_themselves(folder: Path, kept: Path) -> None:
    answer(folder, kept)
    (path,) = files(kept)
    settings: dict[str, Any] = {"users": 1, "seq_length": 32, "weight_cache": str(kept)}
    with MultiUserLLM.from_pretrained(folder, **settings) as llm:
        llm.submit(PROMPT, params=GREEDY).result()
        parameters = {one.name: one for one in llm._runner.model.get_parameters()}
        matrices = [one for name, one in parameters.items() if name.endswith("dense.weight")]
        places = DEVICE_THREAD.call(lambda: [memory_of(one).ctypes.data for one in matrices])
        lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    ranges = [(int(begin, 16), int(end, 16)) for begin, end in mapped]
    assert places
    assert all(any(begin <= one < end for begin, end in ranges) for one in places)


@pytest.mark.parametrize("settings", [{"weight_dtype": "int8"}, {"weight_dtype": "bfloat16"}])
def test_every_type_of_weights_has_its_own_file(
    folder: Path, kept: Path, reads: list[str], settings: dict[str, Any]
) -> None:
    plain, other = answer(folder, kept), answer(folder, kept, **settings)
    assert plain[1] != other[1]
    assert len(files(kept)) == 2
    reads.clear()
    assert (answer(folder, kept), answer(folder, kept, **settings)) == (plain, other)
    assert reads == []


def test_a_checkpoint_that_changed_is_packed_again(folder: Path, kept: Path) -> None:
    """Even if its size and its time of modification are what they were."""
    expected = answer(folder, kept)
    path = folder / "model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    values = np.frombuffer(content, "<f4", offset=header)
    values *= np.float32(0.5)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = answer(folder, kept)
    assert changed[1] != expected[1]
    assert len(files(kept)) == 1
    assert answer(folder, kept, weight_cache="off") == changed


def test_numbers_that_are_to_be_read_in_another_way_are_packed_again(
    tmp_path: Path, kept: Path
) -> None:
    folder, _ = folders(tmp_path, "gptq")
    before = answer(folder, kept)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config))
    changed = answer(folder, kept)
    assert changed != before
    assert changed == answer(folder, kept, weight_cache="off")
    assert len(files(kept)) == 1


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the last tensor": lambda path: flip(path, path.stat().st_size - 3),
    "a bit of the first tensor": lambda path: flip(path, 4096),
    "a bit of the header": lambda path: flip(path, 60),
    "the header's length": lambda path: flip(path, 0),
    "cut short": lambda path: cut(path, path.stat().st_size - 1),
    "cut in the header": lambda path: cut(path, 1000),
    "nothing in it": lambda path: cut(path, 0),
    "more in it": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "deep JSON": lambda path: path.write_bytes((99_992).to_bytes(8, "little") + b"[" * 99_992),
    "another kind of JSON": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_noticed(
    kept: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache, arrays = small(kept)
    cache.save(arrays)
    good = cache.path.read_bytes()
    DAMAGES[damage](cache.path)
    assert cache.path.read_bytes() != good
    assert cache.load(nothing) is None
    assert "packed weights are made anew" in caplog.text
    cache.save(arrays)
    assert cache.path.read_bytes() == good


@given(st.integers(0, 2**32), st.integers(0, 7))
def test_any_bit(place: int, bit: int) -> None:
    with TemporaryDirectory() as kept:
        cache, arrays = small(Path(kept))
        cache.save(arrays)
        content = bytearray(cache.path.read_bytes())
        content[place % len(content)] ^= 1 << bit
        cache.path.write_bytes(content)
        found = cache.load(nothing)
        # Blanks behind the header may be tabs.
        assert found is None or all(np.array_equal(found[one], arrays[one]) for one in arrays)


def test_a_start_with_a_damaged_file(folder: Path, kept: Path) -> None:
    expected = answer(folder, kept)
    (path,) = files(kept)
    good = path.read_bytes()
    flip(path, len(good) // 2)
    assert answer(folder, kept) == expected
    assert files(kept) == [path]
    assert path.read_bytes() == good


def test_a_file_of_something_else_is_not_taken(kept: Path) -> None:
    cache, arrays = small(kept)
    other, _ = small(kept, {"weight_dtype": "int8"})
    assert other.path != cache.path
    other.save(arrays)
    shutil.copyfile(other.path, cache.path)
    assert cache.load(nothing) is None


@pytest.mark.parametrize("change", ["version", "model"])
def test_another_version_replaces_the_file(kept: Path, change: str) -> None:
    settings = {"version": "1", "model": "hidden_size=8", "weight_dtype": "int8"}
    old, arrays = small(kept, settings)
    old.save(arrays)
    new, _ = small(kept, {**settings, change: "2"})
    assert new.load(nothing) is None
    new.save(arrays)
    assert files(kept) == [new.path]
    assert new.load(nothing) is not None
    assert old.load(nothing) is None


RUN = """
import json, sys
from pathlib import Path
from tests.api.test_weight_cache import answer
{before}
print(json.dumps(answer(Path(sys.argv[1]), Path(sys.argv[2]))))
"""


def start(folder: Path, kept: Path, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN.format(before=before), str(folder), str(kept)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def answered(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


KILLED = """
import os, signal
write = os.pwritev
def half(file, buffers, place):
    write(file, [b"".join(buffers)[: sum(map(len, buffers)) // 2]], place)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwritev = half
"""


def test_a_process_that_is_killed_while_it_writes(folder: Path, kept: Path) -> None:
    process = start(folder, kept, KILLED)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (remains,) = files(kept)
    assert remains.suffix == ".part"
    assert remains.stat().st_size > 0
    expected = answer(folder, kept)
    (path,) = files(kept)
    assert path.suffix == ".safetensors"
    assert answer(folder, kept) == expected == answer(folder, kept, weight_cache="off")


def test_what_another_process_is_writing_is_left_alone(kept: Path) -> None:
    """While it is locked; in this process the lock is held by another open file."""
    import fcntl

    kept.mkdir()
    theirs, remains = kept / f".theirs-{REMAINS}", kept / f".remains-{REMAINS}"
    remains.write_bytes(b"half")
    with theirs.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache, arrays = small(kept)
        cache.save(arrays)
        assert files(kept) == [theirs, cache.path]


def test_partial_files_of_others_are_left_alone(kept: Path) -> None:
    kept.mkdir()
    session = f".{'a' * 16}-{'b' * 32}-{'c' * 16}.session-1234abc_.part"
    theirs = {kept / name for name in (".film.mkv.part", ".secret-1234abc_.part", session)}
    for path in (*theirs, kept / f".remains-{REMAINS}"):
        path.write_bytes(b"half")
    cache, arrays = small(kept)
    cache.save(arrays)
    assert set(files(kept)) == {*theirs, cache.path}


def test_remains_that_cannot_be_opened_are_left_alone(kept: Path) -> None:
    kept.mkdir()
    (kept / f".remains-{REMAINS}").mkdir()
    cache, arrays = small(kept)
    cache.save(arrays)
    assert cache.load(lambda *now: None) is not None


def test_processes_that_write_the_same_file(folder: Path, kept: Path) -> None:
    processes = [start(folder, kept) for _ in range(2)]
    answers = [answered(process) for process in processes]
    assert len(files(kept)) == 1
    expected = json.loads(json.dumps(answer(folder, kept)))
    assert answers == [expected, expected]


def small(
    kept: Path, settings: Mapping[str, Any] = MappingProxyType({"weight_dtype": "int4"})
) -> tuple[WeightCache, dict[str, np.ndarray]]:
    """A cache of two arrays, and the arrays."""
    random = np.random.default_rng(0)
    matrix = random.integers(-128, 128, (40, 1000), np.int8)
    arrays: dict[str, np.ndarray] = {"norm": np.arange(5, dtype=np.float32), "matrix": matrix}
    sizes = {name: (one.shape, one.dtype) for name, one in arrays.items()}
    return WeightCache.of(kept, [Path(__file__)], dict(settings), sizes), arrays


@pytest.fixture
def full_disk() -> Iterator[None]:
    """The system lets this process write 10,000 bytes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.usefixtures("full_disk")
def test_no_room_to_write(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, arrays = small(kept)
    cache.save(arrays)
    assert "packed weights are not kept" in caplog.text
    assert os.strerror(errno.EFBIG) in caplog.text
    assert files(kept) == []
    assert cache.load(nothing) is None


def test_a_start_with_a_full_disk(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(folder, kept, weight_cache="off")

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert answer(folder, kept) == expected
    assert "No space left on device" in caplog.text
    assert files(kept) == []
    assert answer(folder, kept) == expected
    assert len(files(kept)) == 1


def test_a_folder_that_is_none(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.write_text("not a folder")
    assert answer(folder, place / "below") == answer(folder, place, weight_cache="off")
    assert "packed weights are not kept" in caplog.text


def test_short_writes_are_continued(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, arrays = small(kept)
    write = os.pwritev

    def short(file: int, buffers: list[memoryview], place: int) -> int:
        return write(file, [b"".join(buffers)[:777]], place)

    monkeypatch.setattr(os, "pwritev", short)
    cache.save(arrays)
    found = cache.load(nothing)
    assert found is not None
    assert all(np.array_equal(found[name], values) for name, values in arrays.items())


def test_what_is_written_to_mapped_weights_stays_in_this_process(kept: Path) -> None:
    cache, arrays = small(kept)
    cache.save(arrays)
    found = cache.load(nothing)
    assert found is not None
    found["matrix"][:] = 0
    again = cache.load(nothing)
    assert again is not None
    assert np.array_equal(again["matrix"], arrays["matrix"])


def test_progress_is_in_mebibytes(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(b"")
    arrays = {str(number): np.full((3, 1 << 20), number, np.int8) for number in range(4)}
    sizes = {name: (one.shape, one.dtype) for name, one in arrays.items()}
    cache = WeightCache.of(tmp_path, [path], {"weight_dtype": "int8"}, sizes)
    cache.save(arrays)
    reported: list[tuple[int, int, str]] = []
    assert cache.load(lambda *words: reported.append(words)) is not None
    assert reported == [(done, 13, "MiB of packed weights") for done in (0, 3, 6, 9)]


class TestFolder:
    def test_by_default_where_caches_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(weight_cache.VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "/somebody")
        assert cache_folder(None) == Path("/somebody/.cache/glm_multiuser")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert cache_folder(None) == Path("/elsewhere/glm_multiuser")
        monkeypatch.setenv(weight_cache.VARIABLE, "off")
        assert cache_folder(None) is None
        monkeypatch.setenv(weight_cache.VARIABLE, "~nobody-here/x")
        with pytest.raises(ConfigError, match=f"{weight_cache.VARIABLE} is '~nobody-here/x'"):
            cache_folder(None)
        assert cache_folder("~/here") == Path("/somebody/here")
        assert cache_folder("off") is None
