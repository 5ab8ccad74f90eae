"""API keys: their sources, and that nothing leaks them."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from glm_multiuser.errors import ConfigError
from glm_multiuser.server import keys as keys_module
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.keys import ENVIRONMENT, Caller, KeyRing, read_keys
from tests.server.in_process import mock_settings

RED, BLUE = "red-key-0123456789", "blue-key-0123456789"
KEYS = {"red": RED, "blue": BLUE}


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def file_with(folder: Path, text: str) -> Path:
    file = folder / "keys.txt"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_line_is_a_name_and_a_key_or_a_key_alone(tmp_path: Path) -> None:
    text = f"# who may ask\n\nred {RED}\n   \n  {BLUE}  \r\n#red other-key-0123456789\n"
    assert read_keys(file_with(tmp_path, text)).keys == {"red": RED, "key-2": BLUE}
    assert read_keys(file_with(tmp_path, "\ufeff" + text)).keys == {"red": RED, "key-2": BLUE}


def test_the_environment_holds_the_same_with_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_keys(None) == ({}, frozenset())
    monkeypatch.setenv(ENVIRONMENT, f"{RED}, blue {BLUE},")
    assert read_keys(None).keys == {"key-1": RED, "blue": BLUE}
    file = file_with(tmp_path, "green green-key-0123456789")
    assert read_keys(file).keys == {"green": "green-key-0123456789", "key-2": RED, "blue": BLUE}


def test_a_key_with_a_name_may_have_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "green green-key-0123456789 admin")
    found = read_keys(file_with(tmp_path, f"red  {RED}\tadmin\nblue {BLUE}"))
    assert found.keys == {"red": RED, "blue": BLUE, "green": "green-key-0123456789"}
    assert found.admins == {"red", "green"}
    ring = KeyRing(*found)
    assert ring.caller(f"Bearer {RED}") == Caller("red", admin=True)
    assert ring.caller(f"Bearer {BLUE}") == Caller("blue")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"red {RED} root", "line 1 of {file} is not a name and a key, or a name, a key and the"),
        (f"red {RED} admin {BLUE}", "line 1 of {file} is not a name and a key"),
        (f"{RED} admin", "line 1 of {file} has a key of 5 characters"),
        ("red too-short", "line 1 of {file} has a key of 9 characters; it must have 16 to 512"),
        ("\nred " + "x" * 513, "line 2 of {file} has a key of 513 characters"),
        ("red keyé-0123456789abcdef", "line 1 of {file} has a key of 21 characters"),
        (f"my name {RED}", "line 1 of {file} is not a name and a key"),
        (f"my/name {RED}", "line 1 of {file} is not a name and a key"),
        (f"{'n' * 65} {RED}", "line 1 of {file} is not a name and a key"),
        (f"red {RED}\nred {BLUE}", "line 2 of {file} has the name or the key of an earlier one"),
        (f"red {RED}\nblue {RED}", "line 2 of {file} has the name or the key of an earlier one"),
        (f"key-2 {RED}\n{BLUE}", "line 2 of {file} has the name or the key of an earlier one"),
        ("", "{file} holds no API key"),
        ("# nobody\n\n", "{file} holds no API key"),
    ],
)
def test_a_file_that_cannot_be_says_where_and_shows_no_secret(
    tmp_path: Path, text: str, told: str
) -> None:
    file = file_with(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_keys(file)
    assert told.format(file=file) in str(error.value)
    for word in text.split():
        if len(word) >= 9 and word != "#":
            assert word not in str(error.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the API keys in"):
        read_keys(tmp_path / "nothing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the API keys in"):
        read_keys(tmp_path / "binary")


def test_an_entry_of_the_environment_that_cannot_be_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"red {RED},a secret too-many-words")
    with pytest.raises(ConfigError, match=f"entry 2 of {ENVIRONMENT} is not") as error:
        read_keys(None)
    assert "too-many-words" not in str(error.value)


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer   {} "])
def test_a_key_opens(form: str) -> None:
    ring = KeyRing(KEYS)
    assert ring.caller(form.format(RED)) == Caller("red")
    assert ring.caller(form.format(BLUE)) == Caller("blue")


def test_without_keys_everybody_is_anonymous() -> None:
    assert KeyRing({}).caller(None) == KeyRing({}).caller("Basic abc") == Caller("anonymous")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", RED, f"Basic {RED}", f",{RED}"])
def test_no_key(header: str) -> None:
    with pytest.raises(APIError, match="an API key is needed") as refused:
        KeyRing(KEYS).caller(header)
    assert (refused.value.status, refused.value.code) == (401, "missing_api_key")
    assert refused.value.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", [RED[:-1], RED + "0", RED.upper(), "red", "x", RED + BLUE, "é\x80"])
def test_a_wrong_key(key: str) -> None:
    with pytest.raises(APIError, match="not known here") as refused:
        KeyRing(KEYS).caller(f"Bearer {key}")
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert key not in str(refused.value)


@pytest.mark.parametrize("key", [RED, BLUE, "wrong-key-0123456789"])
def test_every_key_is_compared_in_constant_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def counted(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, given)

    ring = KeyRing({**KEYS, "green": "green-key-0123456789"})
    monkeypatch.setattr(keys_module, "hmac", type("hmac", (), {"compare_digest": counted}))
    try:
        ring.caller(f"Bearer {key}")
    except APIError:
        assert key.startswith("wrong")
    assert len(set(compared)) == 3
    assert all(len(known) == 32 for known in compared)  # digests, whatever the keys' lengths


def test_nothing_shows_a_key() -> None:
    settings = mock_settings(keys=KEYS)
    ring = KeyRing(KEYS)
    shown = repr(settings) + repr(ring) + repr(vars(ring))
    assert RED not in shown
    assert BLUE not in shown


def test_a_session_is_inside_its_key() -> None:
    red, blue = Caller("red"), Caller("blue")
    user = red.user("blue/mine")
    assert user == "red/blue/mine"
    assert red.session_of(user) == "blue/mine"
    assert blue.session_of(user) is None
    assert red.user("a") != blue.user("a")
    assert red.user(None) is red.user("") is None
    assert red.session_of(None) is None
    assert red.session_of("red") is None


@pytest.mark.parametrize("session", ["x" * 257, "a\nb", "\x00", "\ud800", "\u2028"])
def test_a_session_that_cannot_be(session: str) -> None:
    with pytest.raises(APIError, match="at most 256, all printable") as refused:
        Caller("red").user(session)
    assert refused.value.status == 400
    assert Caller("red").user("x" * 256) == "red/" + "x" * 256
