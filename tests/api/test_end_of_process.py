"""A script that ends with an engine in a variable, closed or not, prints nothing of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from glm_multiuser.cli.loading import DEFAULT_CHECKPOINT, find_checkpoint

PROGRAM = """
from glm_multiuser import MultiUserLLM, SamplingParams

llm = MultiUserLLM.from_pretrained({folder!r}, users=2, seq_length=128, progress=lambda *told: None)
print(len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
{close}
"""


@pytest.mark.slow
@pytest.mark.parametrize("close", ["llm.close()", ""])
def test_a_script_ends_without_a_word(close: str) -> None:
    program = PROGRAM.format(folder=str(find_checkpoint(DEFAULT_CHECKPOINT)), close=close)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout == "3\n"
    assert "Traceback" not in ended.stderr
