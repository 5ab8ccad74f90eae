"""Servers shared by several test files, and the quick tests of `make check`."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from glm_multiuser.backends.native.compiler import FLAGS
from glm_multiuser.weight_cache import VARIABLE
from tests.server.process import ServerProcess

USERS = 4
SEQ_LENGTH = 256
# How long examples take to make says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ARGUMENTS = ("--users", str(USERS), "--seq-length", str(SEQ_LENGTH))


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Shared by all tests that do not change its state."""
    with ServerProcess(*ARGUMENTS) as process:
        yield process


def pytest_configure(config: pytest.Config) -> None:
    """A weight cache for this run, shared by all its processes."""
    if VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="packed_weights_")
        os.environ[VARIABLE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection() -> None:
    """Imported objects stay: searching them for garbage takes two of twenty seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """MindSpore collects garbage before every graph: with a million objects of imported modules and
    of tests, that takes a second each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """Nothing is frozen, as in a service, and automatic collection is off."""
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-compile",
        action="store_true",
        help="skip every test as soon as it compiles a graph or kernels, or starts another Python",
    )


@pytest.fixture(scope="session", autouse=True)
def no_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """Implements `--no-compile` without a list of tests."""
    if not request.config.getoption("no_compile"):
        yield
        return
    from mindspore.common import api

    def compile(*args: Any, **options: Any) -> None:
        pytest.skip("compiles a graph")

    class Popen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
            if sys.executable in args or FLAGS[0] in args:
                pytest.skip("starts another Python, or compiles kernels")
            super().__init__(args, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api._CellGraphExecutor, "compile", compile)
        patch.setattr(api._JitExecutor, "compile", compile)
        patch.setattr(subprocess, "Popen", Popen)
        yield
