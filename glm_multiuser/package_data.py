"""Files beside the code: at the top of a checkout, and below `data/` in a wheel.

Both have the same relative paths. `setup.py` copies `FOLDERS` into wheels and imports this file, so
it needs the standard library only.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path("ckpt/glm-tiny")
GOLDEN = Path("tests/golden/chatglm_6b_3layers")
TRITON_REPOSITORY = Path("deploy/model_repository")
PATCHES = Path("patches")

FOLDERS = (CHECKPOINT, GOLDEN, TRITON_REPOSITORY, PATCHES)
IGNORED = ("__pycache__", "expected_long.*")
"""What wheels leave out of them: the long golden cases are for the tests alone."""

DATA = Path(__file__).resolve().with_name("data")
ROOT = DATA if DATA.is_dir() else DATA.parents[1]
"""What the relative paths start from."""
