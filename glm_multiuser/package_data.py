"""Data files: at the top of a checkout, and in `data/` of a wheel.

Relative paths are the same in both. `setup.py` copies `FOLDERS` into wheels and imports this file,
which therefore needs only the standard library.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path("ckpt/glm-tiny")
GOLDEN = Path("tests/golden/chatglm_6b_3layers")
TRITON_REPOSITORY = Path("deploy/model_repository")
PATCHES = Path("patches")

FOLDERS = (CHECKPOINT, GOLDEN, TRITON_REPOSITORY, PATCHES)
IGNORED = ("__pycache__", "expected_long.*")
"""Excluded from wheels; only tests use the long golden cases."""

DATA = Path(__file__).resolve().with_name("data")
ROOT = DATA if DATA.is_dir() else DATA.parents[1]
"""Base of the relative paths."""
