"""The wheel, built as `make wheel` does but by a quick compiler, and an environment with nothing of
the checkout in it.

The commands are those of the Dockerfile, from the files that Docker would get.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler
from glm_multiuser.backends.native.compiler import BuildError
from tests.deploy.dockerfile import ROOT, command_with
from tests.packaging.environment import Installed, run

PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
WITHOUT_ISOLATION = {"PIP_NO_BUILD_ISOLATION": "0"}  # for pip, this is yes
WITHOUT_INDEX = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}


def not_sources() -> list[str]:
    """What Docker gets nothing of."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line.replace("**/", "") for line in lines if not line.startswith("#")]


def quick_compiler(folder: Path) -> str:
    """A value of `CXX`: without optimisation, and too old for levels above `avx2`.

    What the kernels compute is tested elsewhere, as an installation compiles them.
    """
    try:
        real = compiler._compiler()
    except BuildError as error:
        pytest.skip(f"the wheel would be without its kernels: {error}")
    quick = folder / "quick_compiler"
    quick.write_text(
        '#!/bin/sh\ncase "$*" in *-mavx512* | *-mavxvnni*) exit 1;; esac\n'
        f'exec {shlex.join(real)} "$@" -O0\n'
    )
    quick.chmod(0o755)
    return shlex.quote(str(quick))


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of a copy of the checkout, by the setuptools that is here."""
    folder = tmp_path_factory.mktemp("archive")
    sources = folder / "sources"
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*not_sources()))
    build = (sys.executable, "-m", "build", "--no-isolation", "--sdist", "-o", folder, sources)
    run(*build, folder=folder)
    (packed,) = folder.glob("*.tar.gz")
    return packed


@pytest.fixture(scope="session")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(archive, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    command = command_with("pip wheel").replace("/wheels", str(folder / "wheels"))
    variables = {"PATH": PROGRAMS, "CXX": quick_compiler(folder), **WITHOUT_ISOLATION}
    run("sh", "-ec", command, folder=unpacked, **variables)
    (built,) = (folder / "wheels").iterdir()
    repair = (sys.executable, "-m", "auditwheel", "repair", "-w", folder / "dist", built)
    run(*repair, folder=folder, PATH=PROGRAMS)
    (repaired,) = (folder / "dist").iterdir()
    return repaired


@pytest.fixture(
    scope="session",
    params=[
        "packages that are here",
        pytest.param("packages of the index", marks=[pytest.mark.rare, pytest.mark.timeout(3600)]),
    ],
)
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """What the wheel requires is downloaded, or found where the packages of the tests are."""
    result = Installed(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty"))
    run(sys.executable, "-m", "venv", result.environment, folder=result.folder)
    command = command_with("pip install").replace("/wheels", str(wheel.parent))
    install = command.replace("/constraints.txt", str(ROOT / "constraints.txt"))
    path = os.pathsep.join([str(result.environment / "bin"), os.environ["PATH"]])
    if request.param == "packages of the index":
        run("sh", "-ec", install.replace("[server", "[triton,server"), folder=ROOT, PATH=path)
    else:
        run("sh", "-ec", install, folder=ROOT, PATH=path, **WITHOUT_INDEX)
        # A .pth file adds folders without reading the .pth files in them: an editable install of
        # the checkout stays out.
        here = [path for path in sys.path if Path(path).name == "site-packages"]
        (result.packages / "here.pth").write_text("\n".join(here), encoding="utf-8")
    yield result
    shutil.rmtree(result.environment)  # a few gigabytes, which pytest would keep for a while
