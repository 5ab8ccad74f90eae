"""Making a MindFormers multi-user in memory: with a small package in its place."""

from __future__ import annotations

import gc
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from glm_multiuser.errors import ConfigError, PatchError
from glm_multiuser.mindformers import enable
from tests.mindformers.fake import CONFIG, LAYERS, PATCHES, Release, contents, git

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_mindformers(release: Release, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the real MindFormers nor that of another test is imported; patches are ours."""
    folder = release.patches.parent
    monkeypatch.setattr("glm_multiuser.mindformers.series.patches_folder", lambda: folder)
    monkeypatch.setitem(sys.modules, "mindspore", ModuleType("mindspore"))
    real = forget_mindformers()
    yield
    forget_mindformers()
    sys.modules.update(real)


def forget_mindformers() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "mindformers"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def installed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `import mindformers` finds the small package."""
    monkeypatch.syspath_prepend(str(wheel))
    return wheel


def imported() -> Any:
    return importlib.import_module("mindformers")


def sums(model: Any) -> list[int]:
    """What three calls give: the past of user 0 has no part in what user 1 gets."""
    return [model.construct(5, user=0), model.construct(1, user=1), model.construct(2, user=1)]


@pytest.mark.usefixtures("installed")
def test_names_from_before_become_multi_user() -> None:
    mindformers = imported()
    config_class, model_class = mindformers.GLMConfig, mindformers.GLMChatModel

    class Own(model_class):  # type: ignore[misc, valid-type]
        pass

    enable(2)
    assert (config_class, model_class) == (mindformers.GLMConfig, mindformers.GLMChatModel)
    config = config_class(hidden_size=8)
    assert (config.users, config.layers, config.hidden_size) == (2, 1, 8)
    assert sums(model_class(config)) == [5, 1, 3]
    assert sums(Own(config)) == [5, 1, 3]


@pytest.mark.usefixtures("installed")
def test_every_name_of_a_class_is_the_one_class() -> None:
    before = imported()
    config_class, model_class = before.GLMConfig, before.GLMChatModel
    enable(2)
    modules = {name: sys.modules[f"mindformers.models.glm.{name}"] for name in ("glm", "layers")}
    registry = sys.modules["mindformers.tools.register"].MindFormerRegister.registry
    assert modules["glm"].GLMConfig is config_class is registry["config"]["GLMConfig"]
    assert modules["glm"].GLMChatModel is model_class is registry["models"]["GLMChatModel"]
    assert modules["glm"].Layer is modules["layers"].Layer
    assert model_class.config_class is config_class
    assert modules["layers"].Past.__module__ == "mindformers.models.glm.layers"


def test_the_source_of_everything_is_the_patched_one(
    installed: Path, release: Release, tmp_path: Path
) -> None:
    enable(2)
    layers: Any = sys.modules["mindformers.models.glm.layers"]
    assert "self.past[user].append(token)" in inspect.getsource(layers.Layer.construct)
    assert "self.past[user].append(token)" in inspect.getsource(layers.Layer)
    patched = release.copied_to(tmp_path / "patched", patches=len(PATCHES))
    assert inspect.getsource(layers) == (patched / LAYERS).read_text()
    assert contents(installed) == contents(release.wheel)


@pytest.mark.usefixtures("installed")
def test_again_only_changes_the_default() -> None:
    enable(2)
    first = imported().GLMConfig()
    construct = imported().GLMChatModel.construct
    enable(3)
    assert imported().GLMChatModel.construct is construct
    assert (first.users, imported().GLMConfig().users, imported().GLMConfig(users=5).users) == (
        2,
        3,
        5,
    )


@pytest.mark.parametrize("kind", ["config", "model", "subclass"])
def test_what_exists_already_is_refused(installed: Path, kind: str) -> None:
    mindformers = imported()

    class Own(mindformers.GLMChatModel):  # type: ignore[name-defined]
        pass

    config = mindformers.GLMConfig()
    existing = {"config": config, "model": mindformers.GLMChatModel, "subclass": Own}[kind]
    if kind != "config":
        existing = existing(config)
        del config
    with pytest.raises(PatchError, match=r"there is a \w+ already: enable must be called before"):
        enable(2)
    assert not hasattr(mindformers.GLMConfig, "default_users")
    assert sys.modules["mindformers.models.glm.glm"].__file__ == str(
        installed / "mindformers/models/glm/glm.py"
    )
    del existing


@pytest.mark.usefixtures("installed")
def test_what_nobody_can_reach_does_not_count() -> None:
    config = imported().GLMConfig()
    config.itself = config
    gc.disable()
    try:
        del config
        enable(2)
    finally:
        gc.enable()
    assert imported().GLMConfig().users == 2


def test_patched_files_are_used_as_they_are(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = release.copied_to(tmp_path / "patched", patches=len(PATCHES))
    monkeypatch.syspath_prepend(str(folder))
    existing = imported().GLMConfig()
    enable(4)
    assert (existing.users, imported().GLMConfig().users) == (1, 4)
    assert sums(imported().GLMChatModel(existing.__class__())) == [5, 1, 3]
    assert sys.modules["mindformers.models.glm.glm"].__file__ == str(
        folder / "mindformers/models/glm/glm.py"
    )


def test_files_that_were_patched_after_the_import(installed: Path, release: Release) -> None:
    model_class = imported().GLMChatModel
    for patch in sorted(release.patches.iterdir()):
        git(installed, "apply", str(patch))
    enable(2)
    assert sums(model_class(imported().GLMConfig())) == [5, 1, 3]


def test_partly_patched_files(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(release.copied_to(tmp_path / "partly", patches=1)))
    enable(2)
    assert sums(imported().GLMChatModel(imported().GLMConfig())) == [5, 1, 3]


def test_changed_sources_are_refused_before_the_import(installed: Path) -> None:
    (installed / CONFIG).write_text("")
    with pytest.raises(PatchError, match=rf"seems to be 2\.0\.0, but {CONFIG} is "):
        enable(2)
    assert "mindformers" not in sys.modules


def test_an_unknown_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindformers").mkdir()
    (tmp_path / "mindformers" / "__init__.py").write_text('__version__ = "1.5.0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PatchError, match=r"version 1\.5\.0; there are patches for 1\.0\.0, 2\.0"):
        enable(2)


def test_a_series_that_reaches_beyond_glm(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_multiuser.mindformers.run_time.IN_THEIR_ORDER", ("a.b",))
    with pytest.raises(PatchError, match=f"glm-multiuser patch --apply {installed}"):
        enable(2)
    assert "mindformers" not in sys.modules


def test_no_mindformers_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindformers", None)
    with pytest.raises(PatchError, match=r"not installed: pip install 'glm_multiuser\[mindform"):
        enable(2)


@pytest.mark.parametrize("users", [0, -1, True, 2.0, "2", None])
@pytest.mark.usefixtures("installed")
def test_users_that_are_no_number_of_users(users: Any) -> None:
    with pytest.raises(ConfigError, match=r"users is .*; it must be a whole number of at least 1"):
        enable(users)
    assert "mindformers" not in sys.modules


def test_the_import_of_this_library_imports_neither() -> None:
    program = (
        "import sys, glm_multiuser.mindformers\n"
        "assert not {'mindspore', 'mindformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
