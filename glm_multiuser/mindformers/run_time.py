"""Makes an installed MindFormers multi-user in a running process, without changing its files.

The sources are patched in memory and executed again in the existing modules. Every class keeps its
identity and gets the attributes of the new class, so names that were imported before, and
subclasses, change with it.
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
    """Makes the installed MindFormers' GLM multi-user; `users` is the default for its configs.

    Call it before creating the first GLM config or model. Further calls only change the number of
    users of later configs.

    Raises:
        ConfigError: `users` is not an integer of at least 1.
        PatchError: MindFormers is not installed, of an unknown version, modified, or in use.
    """
    if not isinstance(users, int) or isinstance(users, bool) or users < 1:
        raise ConfigError(f"users is {users!r}; it must be a whole number of at least 1")
    with _ONE_AT_A_TIME:
        done = sys.modules.get(IN_THEIR_ORDER[-1])
        if not isinstance(getattr(done, "__loader__", None), PatchedSource):
            _patch(open_tree(_installed_package(), read_all_series()))
        sys.modules[CONFIG].GLMConfig.default_users = users


class PatchedSource(SourceFileLoader):
    """Loads a module from patched source, in a file, because MindSpore's compiler reads it."""


def _installed_package() -> Path:
    spec = find_spec("mindformers")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError(
            "MindFormers is not installed: pip install 'glm_multiuser[mindformers]' brings the "
            "version that GLM is made multi-user in"
        )
    return Path(spec.submodule_search_locations[0])


def _patch(tree: Tree) -> None:
    """Loads the patched sources of a MindFormers, unless its files are already patched."""
    sources = {
        file.path[: -len(".py")].replace("/", "."): (file.path, file.patched())
        for file in tree.files
    }
    if tree.state != "patched" and not sources.keys() <= set(IN_THEIR_ORDER):
        raise PatchError(
            f"MindFormers {tree.version} has to be patched before it is imported: "
            f"glm-multiuser patch --apply {tree.root}"
        )
    import_module("mindspore")  # MindFormers expects it to be imported
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
    """Returns the classes that a module defines, not those that it imports."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }


def _refuse_if_in_use(modules: Sequence[ModuleType]) -> None:
    """Raises PatchError for objects of the old code, which lack caches and settings of the new."""
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
    """Returns the names of these classes and their subclasses that have instances."""
    wanted = set(map(id, classes))
    # by type(): isinstance would query the objects themselves, and load lazy ones
    types = {id(type(one)): type(one) for one in gc.get_objects()}.values()
    return [one.__name__ for one in types if not wanted.isdisjoint(map(id, one.__mro__))]


def _run_again(module: ModuleType, source: Path) -> None:
    """Executes the patched source in a module, and restores its old classes with new attributes."""
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
    # the decorators registered the new classes
    for table in import_module("mindformers.tools.register").MindFormerRegister.registry.values():
        for name, registered in table.items():
            table[name] = replaced.get(registered, registered)


def _take_over(kept: type, made: type) -> None:
    """Replaces all attributes of a class by those of another."""
    for name, value in vars(made).items():
        if name not in ("__dict__", "__weakref__", "_abc_impl"):  # these belong to one class only
            setattr(kept, name, value)
    for referrer in gc.get_referrers(made):
        if isinstance(referrer, CellType):  # where `super()` without arguments finds its class
            referrer.cell_contents = kept
