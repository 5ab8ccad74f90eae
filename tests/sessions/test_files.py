"""Files of sessions: damaged, foreign, too old, too many; a folder that fails, and two servers."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from glm_multiuser.errors import ConfigError, SessionError
from glm_multiuser.sessions.file import read_file, write_file
from glm_multiuser.sessions.folder import SessionFolder
from glm_multiuser.sessions.identity import SECRET_NAME, identity_of, read_secret
from glm_multiuser.sessions.session import Session
from glm_multiuser.sessions.store import SessionStore
from tests.engine.driving import wait_until

FINGERPRINT = "f" * 32
HOUR = 3600.0


def session_of(length: int, filled: int = 7) -> Session:
    pieces = [np.full(40 * length, filled + number, np.uint8) for number in range(3)]
    return Session(tuple(range(length)), pieces)


def folder_at(path: Path, limit: int = 1 << 30, ttl: float = HOUR) -> SessionFolder:
    return SessionFolder(path, limit, ttl, FINGERPRINT)


def same(left: Optional[Session], right: Session) -> bool:
    return (
        left is not None
        and left.token_ids == right.token_ids
        and [piece.tolist() for piece in left.pieces] == [one.tolist() for one in right.pieces]
    )


def test_a_file_is_safetensors_and_has_no_names(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "a" / "b")
    identity = identity_of(folder.secret, b"key", "anna/hello")
    folder.save(identity, session_of(5))
    (path,) = folder.path.glob("*.session")
    assert (
        path.stat().st_mode & 0o777 == (folder.path / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    )
    assert folder.path.stat().st_mode & 0o777 == 0o700
    arrays = load_file(path)
    assert arrays["token_ids"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["keys_and_values"].size == 600
    assert b"anna" not in path.read_bytes()
    assert b"anna" not in path.name.encode()
    assert same(folder.load(identity), session_of(5))


def test_identities_differ_by_secret_tenant_and_user() -> None:
    cases = [
        (secret, owner, user)
        for secret in (b"s", b"t")
        for owner in (b"", b"a", b"ab")
        for user in (1, "1", "b1", "a/1")
    ]
    identities = [identity_of(*case) for case in cases]
    assert len({one.session for one in identities}) == len(cases)
    assert len({one.owner for one in identities}) == 6


WHOLE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "x.session"
    write_file(path, session_of(9), FINGERPRINT, "me")
    WHOLE["bytes"] = path.read_bytes()
    return path


@given(data=st.data())
def test_a_damaged_file_is_never_half_read(whole: Path, data: st.DataObject) -> None:
    content = bytearray(WHOLE["bytes"])
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    path = whole.with_name("damaged.session")
    path.write_bytes(content)
    try:
        found = read_file(path, FINGERPRINT, "me")
    except SessionError:
        return
    assert same(found, session_of(9))  # in what nobody reads, such as the names of types


@given(st.binary(max_size=300))
def test_any_other_file_is_refused(whole: Path, content: bytes) -> None:
    path = whole.with_name("other.session")
    for begin in (b"", len(content).to_bytes(8, "little")):
        path.write_bytes(begin + content)
        with pytest.raises(SessionError, match="damaged"):
            read_file(path, FINGERPRINT)


def test_foreign_files_are_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_at(tmp_path)
    anna, bela = (identity_of(folder.secret, b"", name) for name in ("anna", "bela"))
    folder.save(anna, session_of(3))
    (path,) = tmp_path.glob("*.session")
    path.rename(path.with_name(path.name.replace(anna.name, bela.name)))
    assert folder.load(bela) is None
    assert folder.load(anna) is None
    (record,) = caplog.records
    assert "belongs to somebody else" in record.message
    other = SessionFolder(tmp_path, 1 << 30, HOUR, "e" * 32)
    folder.save(anna, session_of(3))
    assert other.load(anna) is None
    with pytest.raises(SessionError, match="belongs to another model, other weights or settings"):
        read_file(next(tmp_path.glob("*.session")), "e" * 32)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    one = session_of(100)
    folder = folder_at(tmp_path, limit=3 * (one.nbytes + 1000))
    identities = [identity_of(folder.secret, b"", number) for number in range(5)]
    for age, identity in enumerate(identities[:3]):
        folder.save(identity, one)
        path = next(tmp_path.glob(f"{identity.name}*"))
        os.utime(path, (time.time() - 100 + age,) * 2)
    assert folder.load(identities[0]) is not None  # used now
    folder.save(identities[3], one)
    kept = [folder.load(identity) is not None for identity in identities]
    assert kept == [True, False, True, True, False]
    assert (folder.count, folder.nbytes <= 3 * (one.nbytes + 1000)) == (3, True)
    assert not folder.save(identities[4], session_of(1000))  # alone it is too large


def test_a_save_lists_the_folder_only_when_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 10 * (session_of(5).nbytes + 1000)
    folder = folder_at(tmp_path, limit)
    listed: list[Any] = []
    files = SessionFolder._files

    def noted(own: SessionFolder) -> Any:
        listed.append(own)
        return files(own)

    monkeypatch.setattr(SessionFolder, "_files", noted)
    for user in (1, 2, 3, 1, 2):
        assert folder.save(identity_of(folder.secret, b"", user), session_of(5))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.session")]
    assert (folder.count, folder.nbytes) == (3, sum(sizes))
    assert listed == []
    for user in range(40):
        folder.save(identity_of(folder.secret, b"", user), session_of(5))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.session")) <= limit
    assert listed


def test_expired_sessions_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_at(tmp_path, ttl=HOUR)
    disk, memory = SessionStore(folder=folder, ttl=HOUR), SessionStore(10_000, ttl=HOUR)
    identity = disk.identity(b"", 1)
    folder.save(identity, session_of(2))
    memory.put(memory.identity(b"", 1), session_of(2))
    assert len(disk.list(b"")) == len(memory.list(b"")) == 1
    late, ticks = time.time() + 2 * HOUR, time.monotonic() + 2 * HOUR
    monkeypatch.setattr("glm_multiuser.sessions.folder.time.time", lambda: late)
    monkeypatch.setattr("glm_multiuser.sessions.store.time.monotonic", lambda: ticks)
    assert disk.list(b"") == memory.list(b"") == []
    assert folder.load(identity) is None
    assert not list(tmp_path.glob("*.session"))


def test_an_idle_engine_removes_expired_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm_multiuser.sessions.store.COLLECT_SECONDS", 0.01)
    store = SessionStore(10_000, folder_at(tmp_path), HOUR)
    store.put(store.identity(b"", 1), session_of(2))
    wait_until(lambda: store.counts().on_disk)
    assert store.counts().in_memory == 1
    late, ticks = time.time() + 2 * HOUR, time.monotonic() + 2 * HOUR
    monkeypatch.setattr("glm_multiuser.sessions.folder.time.time", lambda: late)
    monkeypatch.setattr("glm_multiuser.sessions.store.time.monotonic", lambda: ticks)
    wait_until(lambda: store.counts().on_disk == store.counts().in_memory == 0)
    assert not list(tmp_path.glob("*.session"))
    store.close()


def test_what_others_have_in_the_folder_stays(tmp_path: Path) -> None:
    names = ("telegram.session", "film.mkv.part", ".film-abc.part", "x.session")
    for name in names:
        (tmp_path / name).write_bytes(bytes(5000))
        os.utime(tmp_path / name, (0, 0))
    own = folder_at(tmp_path)
    identity = identity_of(own.secret, b"", 1)
    own.save(identity, session_of(3))
    (saved,) = tmp_path.glob(f"{identity.name}*")
    remains = [tmp_path / f".{saved.name}-ab1_.part", tmp_path / f".{SECRET_NAME}-ab1_.part"]
    for path in (saved, *remains):
        path.touch()
        os.utime(path, (0, 0))
    folder = folder_at(tmp_path, limit=1)
    assert {path.name for path in tmp_path.iterdir()} == {*names, SECRET_NAME}
    assert (folder.count, folder.nbytes) == (0, 0)


def test_a_read_only_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_at(tmp_path)
    good, bad = (identity_of(folder.secret, b"", number) for number in range(2))
    for identity in (good, bad):
        folder.save(identity, session_of(3))
    damaged = next(tmp_path.glob(f"{bad.name}*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])

    def read_only(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("glm_multiuser.sessions.folder.os.utime", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    assert same(folder.load(good), session_of(3))
    assert folder.load(bad) is None
    (record,) = caplog.records
    assert "it is cut short" in record.message


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_at(tmp_path, ttl=HOUR)
    identity = identity_of(folder.secret, b"", 1)
    now = time.time()
    clock = now + 24 * HOUR
    monkeypatch.setattr("glm_multiuser.sessions.folder.time.time", lambda: clock)
    folder.save(identity, session_of(2))  # the file's own time is that of the system: a day ago
    assert folder.load(identity) is None
    clock = now
    folder.save(identity, session_of(2))
    path = next(tmp_path.glob("*.session"))
    os.utime(path, (now + 24 * HOUR,) * 2)  # as written before the clock was set back
    folder.collect()
    assert path.stat().st_mtime < now + HOUR
    assert same(folder.load(identity), session_of(2))


def test_a_full_disk_is_one_line_until_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_at(tmp_path)
    identities = [identity_of(folder.secret, b"", number) for number in range(3)]
    folder.save(identities[0], session_of(3))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("glm_multiuser.sessions.file.os.fsync", full)
        assert [folder.save(identity, session_of(4)) for identity in identities] == [False] * 3
    (record,) = caplog.records
    assert "No space left on device" in record.message
    assert same(folder.load(identities[0]), session_of(3))  # what was there is whole
    assert not list(tmp_path.glob(".*.part"))
    assert folder.save(identities[1], session_of(4))
    with monkeypatch.context() as patch:
        patch.setattr("glm_multiuser.sessions.file.os.fsync", full)
        folder.save(identities[1], session_of(4))
    assert len(caplog.records) == 2


def test_an_unusable_folder_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from glm_multiuser.config import EngineConfig
    from glm_multiuser.sessions.opening import check_folder, open_store

    (tmp_path / "file").write_text("")
    config = EngineConfig(session_dir=str(tmp_path / "file" / "inside"))
    with pytest.raises(ConfigError, match=r"session_dir is '.*/inside', but .* Not a directory"):
        check_folder(config)
    check_folder(replace(config, cache_prompt=False))  # nothing is kept there
    store = open_store(config, lambda: FINGERPRINT, True)
    assert not store.keeps
    (record,) = caplog.records
    assert "sessions are not kept on disk" in record.message
    shared = folder_at(tmp_path / "kept")
    (shared.path / SECRET_NAME).chmod(0o644)
    with pytest.raises(PermissionError, match="can be read by others"):
        read_secret(shared.path)


def test_a_folder_that_goes_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_at(tmp_path / "kept")
    store = SessionStore(0, folder)
    identity = store.identity(b"", "anna")
    (folder.path / SECRET_NAME).unlink()
    folder.path.rmdir()
    store.put(identity, session_of(3))
    store.forget(identity)
    store.close()
    assert [one.levelno for one in caplog.records] == [logging.WARNING]


def test_two_servers_write_and_remove_the_same_files(tmp_path: Path) -> None:
    limit = 20 * session_of(50).nbytes
    folders = [folder_at(tmp_path, limit) for _ in range(2)]
    assert folders[0].secret == folders[1].secret
    wrong: list[Any] = []

    def use(folder: SessionFolder, own: int) -> None:
        for turn in range(60):
            identity = identity_of(folder.secret, b"", turn % 8)
            folder.save(identity, session_of(50, own + turn % 8))
            found = folder.load(identity)
            expected = [session_of(50, own + turn % 8) for own in (0, 100)]
            if found is not None and not any(same(found, one) for one in expected):
                wrong.append((own, turn))
            if turn % 10 == 9:
                folder.forget(identity)

    threads = [
        threading.Thread(target=use, args=(folder, 100 * own)) for own, folder in enumerate(folders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not list(tmp_path.glob(".*.part"))


def test_many_servers_make_one_secret(tmp_path: Path) -> None:
    secrets: list[bytes] = []
    begin = threading.Barrier(8)

    def read() -> None:
        begin.wait()
        secrets.append(read_secret(tmp_path))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 8
    assert len(set(secrets)) == 1


def test_a_secret_that_was_removed_is_written_again(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    early, late = (identity_of(folder.secret, b"", name) for name in ("early", "late"))
    folder.save(early, session_of(3))
    (tmp_path / SECRET_NAME).unlink()
    folder.save(late, session_of(4))
    assert (tmp_path / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    restarted = folder_at(tmp_path)
    assert restarted.secret == folder.secret
    for name, length in (("early", 3), ("late", 4)):
        identity = identity_of(restarted.secret, b"", name)
        assert same(restarted.load(identity), session_of(length))


def test_memory_has_a_limit_and_an_age(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.monotonic()
    monkeypatch.setattr("glm_multiuser.sessions.store.time.monotonic", lambda: clock)
    store = SessionStore(2 * session_of(10).nbytes, ttl=HOUR)
    names = [store.identity(b"", number) for number in range(3)]
    for name in names:
        assert store.has_room(session_of(10).nbytes)
        store.put(name, session_of(10))
    assert [store.take(name) is not None for name in names] == [False, True, True]
    assert not store.has_room(session_of(30).nbytes)
    clock += 2 * HOUR
    assert [store.take(name) is not None for name in names] == [False, False, False]
    assert store.counts().memory_bytes == 0
    store.close()
