"""The sources of the library without its kernels, for tests of how it is built."""

from __future__ import annotations

import shutil
from pathlib import Path

from glm_multiuser.backends.native import compiler

KEPT = ("levels.cpp", "pool.cpp", "level.hpp", "pool.hpp")
NAME_ONLY = """
#include "level.hpp"
#define NAME_OF(level) #level
#define NAME(level) NAME_OF(level)
#define TABLE_OF(level) table_##level
#define TABLE(level) TABLE_OF(level)
namespace glm {
extern const Level TABLE(LEVEL);
const Level TABLE(LEVEL) = {NAME(LEVEL)};
}  // namespace glm
"""


def names_of_levels(folder: Path) -> Path:
    """A library that knows levels and threads, and no operator, so that it is compiled quickly."""
    copied = folder / "cpu"
    copied.mkdir()
    for name in KEPT:
        shutil.copy(compiler.SOURCES / name, copied)
    (copied / "level_body.cpp").write_text(NAME_ONLY)
    return copied
