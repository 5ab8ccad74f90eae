"""Creates the peers' environments: PyTorch, OpenVINO, and llama.cpp built from source.

    python benchmarks/peers/prepare.py

compare.py does the same on its first run. Everything goes to `.environments` in this folder; remove
it to start over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm_multiuser.cli import screen
from glm_multiuser.errors import GLMMultiUserError

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE / ".environments"
LLAMA = ENVIRONMENTS / "llama_cpp"
LLAMA_CPP_PYTHON = "0.3.36"
SOURCE = LLAMA / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp"
BUILD = LLAMA / f"build-{LLAMA_CPP_PYTHON}-tiles"
TARGET = "llama-batched-bench"

LOAD_TILES = "    _tile_loadconfig(&tc);\n"
KEEP_TILES = '    __asm__ volatile("" : : "m"(tc));\n'

CMAKE_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_SERVER=OFF",
    "LLAMA_BUILD_APP=OFF",
)
AVX2_OPTIONS = (
    "GGML_NATIVE=OFF",
    "GGML_AVX2=ON",
    "GGML_FMA=ON",
    "GGML_F16C=ON",
    "GGML_BMI2=ON",
)


def python_of(name: str) -> Path:
    """Returns the Python of a peer's environment, created if missing.

    Raises:
        GLMMultiUserError: it cannot be installed.
    """
    requirements = (HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    folder = ENVIRONMENTS / f"{name}-python"
    # Written last: an environment without it, or with other pins, is recreated.
    finished = folder / "installed.txt"
    if not finished.exists() or finished.read_text(encoding="utf-8") != requirements:
        screen.notice(f"{name}: creating its environment and installing (minutes) ...")
        ENVIRONMENTS.mkdir(exist_ok=True)
        run([sys.executable, "-m", "venv", "--clear", str(folder)], f"{name}-install")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
        run([*pip, "-r", str(HERE / "requirements" / f"{name}.txt")], f"{name}-install")
        finished.write_text(requirements, encoding="utf-8")
    return folder / "bin" / "python"


def batched_bench(avx2: bool = False) -> Path:
    """Builds llama.cpp's `llama-batched-bench` if missing, for this CPU or for any with AVX2.

    Raises:
        GLMMultiUserError: no compiler, no sources, or they do not build.
    """
    build = BUILD.with_name(f"{BUILD.name}-avx2") if avx2 else BUILD
    program = build / "bin" / TARGET
    if program.exists():
        return program
    if compiler() is None:
        raise GLMMultiUserError("llama.cpp needs a C++ compiler (g++ or clang++) to be built")
    python = python_of("llama_cpp")
    if not SOURCE.exists():
        screen.notice("llama.cpp: downloading the sources ...")
        LLAMA.mkdir(exist_ok=True)
        words = ["download", "--no-deps", "--no-binary", "llama-cpp-python"]
        wanted = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
        pip = [str(python), "-m", "pip"]
        run([*pip, *words, "-d", str(LLAMA), wanted], "llama_cpp-download")
        with tarfile.open(LLAMA / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz") as archive:
            archive.extractall(LLAMA)
    keep_tile_config(SOURCE)
    cmake = shutil.which("cmake")
    if cmake is None:
        run([str(python), "-m", "pip", "install", "cmake==3.31.10"], "llama_cpp-cmake")
        cmake = str(python.with_name("cmake"))
    screen.notice("llama.cpp: building (ten minutes or more on two cores) ...")
    instructions = AVX2_OPTIONS if avx2 else ("GGML_NATIVE=ON",)
    options = [f"-D{option}" for option in (*CMAKE_OPTIONS, *instructions)]
    run([cmake, "-S", str(SOURCE), "-B", str(build), *options], "llama_cpp-configure")
    command = [cmake, "--build", str(build), "--target", TARGET]
    run([*nice(), *command, "-j", str(os.cpu_count() or 1)], "llama_cpp-build")
    return program


def keep_tile_config(source: Path) -> None:
    """Fixes the AMX tile configuration of llama.cpp.

    g++ declares that `_tile_loadconfig` reads 8 of 64 bytes (GCC 12's amxtileintrin.h), so an
    optimised build drops the others and tiles have no rows: the next tile instruction is illegal.
    See llama.cpp's pull request 26954. An empty asm statement that reads all bytes keeps them.

    Raises:
        GLMMultiUserError: another version, without the code to patch.
    """
    path = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    text = path.read_text(encoding="utf-8")
    if LOAD_TILES not in text:
        raise GLMMultiUserError(f"{path.name} of llama.cpp loads its tiles in another way")
    if KEEP_TILES not in text:
        path.write_text(text.replace(LOAD_TILES, KEEP_TILES + LOAD_TILES), encoding="utf-8")


def gguf(shape: Mapping[str, int], kind: str) -> Path:
    """Returns a GGUF model with random weights for llama.cpp, written if missing.

    Raises:
        GLMMultiUserError: it cannot be written.
    """
    batched_bench()  # brings the sources that the file is written with
    text = json.dumps(dict(shape), sort_keys=True)
    folder = LLAMA / "models"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{kind}.gguf"
    if not path.exists():
        screen.notice(f"llama.cpp: writing random weights in {kind} ...")
        unfinished = path.with_suffix(".part")
        command = [str(python_of("llama_cpp")), str(HERE / "make_gguf.py")]
        run(
            [*command, text, kind, str(unfinished)],
            "llama_cpp-model",
            {"PYTHONPATH": str(SOURCE / "gguf-py")},
        )
        unfinished.rename(path)
    return path


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def nice() -> list[str]:
    """Lowers the priority of builds."""
    return ["nice", "-n", "10"] if shutil.which("nice") else []


def run(command: Sequence[str], log: str, variables: Mapping[str, str] | None = None) -> None:
    """Runs a command with its output in a log file, named in errors.

    Raises:
        GLMMultiUserError: it fails.
    """
    path = ENVIRONMENTS / f"{log}.log"
    with path.open("w", encoding="utf-8") as file:
        ended = subprocess.run(
            command, stdout=file, stderr=file, env={**os.environ, **(variables or {})}
        )
    if ended.returncode:
        raise GLMMultiUserError(f"{log} failed; its output is in {path.relative_to(HERE)}")


def main() -> int:
    """Returns the exit code."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    failed = False
    for make in (lambda: python_of("torch"), lambda: python_of("openvino"), batched_bench):
        try:
            make()
        except GLMMultiUserError as error:
            screen.print_error(error)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
