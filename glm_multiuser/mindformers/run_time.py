"""Making an installed MindFormers multi-user in a running process, without touching its files.

The sources are patched in memory and run again in the modules that are there already. Every class
keeps its identity: it takes over what the class made anew has, so names that were imported before,
and subclasses, change with it.
"""

from __future__ import annotations

import atexit
import gc
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from types import CellType, ModuleType

from glm_multiuser.errors import ConfigError, PatchError
from glm_multiuser.mindformers.series import read_all_series
from glm_multiuser.mindformers.tree import Tree, open_tree

GLM = "mindformers.models.glm"
CONFIG = f"{GLM}.glm_config"
IN_THEIR_ORDER = (CONFIG, f"{GLM}.attention", f"{GLM}.layers", f"{GLM}.glm")
"""Each module imports only from those before it."""

_ONE_AT_A_TIME = Lock()


def enable(users: int) -> None:
    """Makes GLM of the installed MindFormers multi-user, for `users` users unless its config says.

    To be called before the first GLM config or model is made. Called again, it only changes the
    number of users for configs to come.

    Raises:
        ConfigError: `users` is no whole number of at least 1.
        PatchError: MindFormers is not installed, of an unknown version, changed, or already in use.
    """
    if not isinstance(users, int) or isinstance(users, bool) or users < 1:
        raise ConfigError(f"users is {users!r}; it must be a whole number of at least 1")
    with _ONE_AT_A_TIME:
        done = sys.modules.get(IN_THEIR_ORDER[-1])
        if not isinstance(getattr(done, "__loader__", None), PatchedSource):
            _patch(open_tree(_installed_package(), read_all_series()))
        sys.modules[CONFIG].GLMConfig.default_users = users


class PatchedSource(SourceFileLoader):
    """Loads a module from patched source. A file is needed: MindSpore's compiler asks for it."""


def _installed_package() -> Path:
    spec = find_spec("mindformers")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError(
            "MindFormers is not installed: pip install 'glm_multiuser[mindformers]' brings the "
            "version that GLM is made multi-user in"
        )
    return Path(spec.submodule_search_locations[0])


def _patch(tree: Tree) -> None:
    """Serves the patched sources of a MindFormers, unless they are what is on disk already."""
    sources = {
        file.path[: -len(".py")].replace("/", "."): (file.path, file.patched())
        for file in tree.files
    }
    if tree.state != "patched" and not sources.keys() <= set(IN_THEIR_ORDER):
        raise PatchError(
            f"MindFormers {tree.version} has to be patched before it is imported: "
            f"glm-multiuser patch --apply {tree.root}"
        )
    import_module("mindspore")  # MindFormers wants to find it imported
    modules = [import_module(name) for name in IN_THEIR_ORDER if name in sources]
    if tree.state == "patched" and hasattr(sys.modules[CONFIG].GLMConfig, "default_users"):
        return
    _refuse_if_in_use(modules)
    folder = Path(mkdtemp(prefix="glm_multiuser-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for module in modules:
        path, source = sources[module.__name__]
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(source)
        _run_again(module, folder / path)


def _classes_of(module: ModuleType) -> dict[str, type]:
    """The classes that a module defines, not those that it imports."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }


def _refuse_if_in_use(modules: Sequence[ModuleType]) -> None:
    """An object made by the old code would meet the new: its caches and settings are missing."""
    classes = [one for module in modules for one in _classes_of(module).values()]
    if _made_of(classes):
        gc.collect()  # unreachable objects do not count
    found = _made_of(classes)
    if found:
        raise PatchError(
            f"there is a {found[0]} already: enable must be called before any config or model of "
            "GLM is made"
        )


def _made_of(classes: Sequence[type]) -> list[str]:
    """The names of the classes, of these or derived from them, that objects exist of."""
    wanted = set(map(id, classes))
    # by type(): isinstance would ask the objects themselves, and wake up lazy ones
    types = {id(type(one)): type(one) for one in gc.get_objects()}.values()
    return [one.__name__ for one in types if not wanted.isdisjoint(map(id, one.__mro__))]


def _run_again(module: ModuleType, source: Path) -> None:
    """Runs the patched source in a module, and puts its old classes back with their new insides."""
    old = _classes_of(module)
    loader = PatchedSource(module.__name__, str(source))
    loader.exec_module(module)
    module.__file__ = loader.path
    module.__loader__ = loader
    module.__spec__ = spec_from_file_location(module.__name__, source, loader=loader)
    replaced = {made: old[name] for name, made in _classes_of(module).items() if name in old}
    for made, kept in replaced.items():
        _take_over(kept, made)
    vars(module).update(old)
    # the decorators have registered the new classes
    for table in import_module("mindformers.tools.register").MindFormerRegister.registry.values():
        for name, registered in table.items():
            table[name] = replaced.get(registered, registered)


def _take_over(kept: type, made: type) -> None:
    """Gives one class all attributes of another."""
    for name, value in vars(made).items():
        if name not in ("__dict__", "__weakref__", "_abc_impl"):  # these belong to one class only
            setattr(kept, name, value)
    for referrer in gc.get_referrers(made):
        if isinstance(referrer, CellType):  # where `super()` without arguments finds its class
            referrer.cell_contents = kept
