"""The thread pool of the kernels: the result does not depend on threads or caller."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from glm_multiuser.backends.native.compiler import SOURCES
from tests.kernels.attention_step import Shape, Step, Token, random_cache
from tests.kernels.calling import bits
from tests.kernels.test_linear import Product

COUNTS = [1, 2, 5]


def products() -> list[Product]:
    return [
        Product.random("linear_add", dtype, rows, 64, 700, seed=rows)
        for dtype in ("float32", "bfloat16", "int8")
        for rows in (1, 13, 200)
    ]


def attend(seed: int) -> bytes:
    """A prompt and two users that decode, over caches of their own."""
    shape = Shape(head_dim=64)
    tokens = [Token(0, position, position + 1, (position % 50,)) for position in range(70)]
    tokens += [Token(user, 100, 101, (1,)) for user in (1, 2)]
    caches = [random_cache(shape, 101, filled, seed) for filled in (0, 100, 100)]
    y = Step.random(shape, tokens, seed).run(caches)
    return bits(y) + bits(caches[0].keys)


def test_bits_do_not_depend_on_the_number_of_threads(best_level: ctypes.CDLL) -> None:
    answers = []
    for count in (*COUNTS, 1):
        best_level.glm_set_threads(count)
        assert best_level.glm_threads() == count
        answers.append([attend(0), *[bits(product.run()) for product in products()]])
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the mode is set as on x86-64")
def test_bits_do_not_depend_on_what_threads_do_with_subnormal_numbers(
    best_level: ctypes.CDLL, tmp_path: Path
) -> None:
    """A caller that takes them for nothing, as MindSpore's do, gets what others get."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source, target = tmp_path / "flush.cpp", tmp_path / "flush.so"
    source.write_text(
        "#include <xmmintrin.h>\n"
        'extern "C" void flush() { _mm_setcsr(_mm_getcsr() | 0x8040); }\n'
        'extern "C" int flushes() { return (_mm_getcsr() & 0x8040) != 0; }\n'
    )
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", target], check=True)
    mode = ctypes.CDLL(str(target))
    product = Product.random("linear", "float32", 1, 64, 20_000)
    product.packed[...] = 1e-40
    product.x[...] = 1
    product.bias[...] = 0

    def ask(flushing: bool) -> list[bytes]:
        if flushing:
            mode.flush()
        found = [bits(product.run()) for _ in range(5)]
        assert mode.flushes() == flushing, "the caller's own mode is as it was"
        return found

    best_level.glm_set_threads(7)  # some of them are started by the caller that flushes
    for flushing in (True, False):
        with ThreadPoolExecutor(1) as caller:
            found = caller.submit(ask, flushing).result()
        assert len(set(found)) == 1
        assert np.frombuffer(found[0], np.float32).min() > 0


def test_fewer_than_one_thread_is_one(best_level: ctypes.CDLL) -> None:
    best_level.glm_set_threads(0)
    assert best_level.glm_threads() == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_callers_on_several_threads(best_level: ctypes.CDLL, count: int) -> None:
    best_level.glm_set_threads(1)
    expected = [(attend(seed), bits(products()[seed].run())) for seed in range(4)]
    best_level.glm_set_threads(count)

    def ask(seed: int) -> bool:
        product = products()[seed]
        return all((attend(seed), bits(product.run())) == expected[seed] for _ in range(15))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(ask, range(4)))


def test_threads_may_change_while_others_compute(best_level: ctypes.CDLL) -> None:
    expected = attend(0)
    with ThreadPoolExecutor(2) as callers:
        answers = [callers.submit(attend, 0) for _ in range(40)]
        for answer in answers:
            for count in COUNTS:
                best_level.glm_set_threads(count)
            assert answer.result() == expected


@pytest.mark.parametrize("spin_time", [0, 50, 2000])
def test_spin_time_does_not_change_answers(best_level: ctypes.CDLL, spin_time: int) -> None:
    expected = attend(0)
    best_level.glm_set_spin_time(spin_time)
    try:
        assert all(attend(0) == expected for _ in range(20))
    finally:
        best_level.glm_set_spin_time(50)


@pytest.mark.slow
def test_no_data_races(tmp_path: Path) -> None:
    """ThreadSanitizer watches the pool alone: several callers, pieces that fail, and thousands of
    pieces, each of which is run once."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    sources = [str(Path(__file__).with_name("pool_stress.cpp")), str(SOURCES / "pool.cpp")]
    command = [compiler, "-std=c++17", "-O1", "-fsanitize=thread", "-pthread", f"-I{SOURCES}"]
    program = tmp_path / "stress"
    built = subprocess.run([*command, *sources, "-o", program], capture_output=True, text=True)
    if "tsan" in built.stderr:  # the linker has no such library
        pytest.skip("there is no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    # It cannot share a process with the AddressSanitizer of test_sanitizers.py.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    ended = subprocess.run([program], capture_output=True, text=True, env=environment)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("0\n", "", 0)


FEWER_THREADS = """
import resource
from tests.kernels.calling import bits, native
from tests.kernels.test_linear import Product

product = Product.random("linear", "float32", 8, 64, 4096)
native().glm_set_threads(1)
alone = bits(product.run())
native().glm_set_threads(64)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(bits(product.run()) == alone)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="statm is Linux's")
def test_threads_that_the_system_refuses_are_not_needed() -> None:
    ended = subprocess.run([sys.executable, "-c", FEWER_THREADS], capture_output=True, text=True)
    assert ended.stdout == "True\n", ended.stderr
