"""The end of a script: with an engine in a variable, and while its threads still use one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from glm_multiuser import Grammar, MultiUserLLM, SamplingParams

def ask(user, **more):
    params = SamplingParams(temperature=0, max_tokens=40, **more)
    return llm.submit([5, 6, 7], user=user, params=params).result()

def after_main():
    pool = ThreadPoolExecutor(1)
    try:
        while True:
            pool.submit(int).result()
    except RuntimeError:  # the interpreter shuts down
        pass
    short = SamplingParams(max_tokens=3, stop="Z", ignore_eos=True)
    stopped = llm.generate([[5, 6], [5, 7]], short)
    print(
        len(ask("plain", ignore_eos=True).token_ids),
        ask("grammar", grammar=Grammar.regex("[ab]{{5}}")).finish_reason,
        len(ask("other", ignore_eos=True).token_ids),
        [len(one.token_ids) for one in stopped],
        len(ask("plain", ignore_eos=True).token_ids),
        llm.failure,
    )

llm = MultiUserLLM.from_pretrained(
    {folder!r}, users=2, seq_length=128, session_dir={sessions!r}, progress=lambda *told: None
)
threading.Thread(target=after_main).start()
"""


@pytest.mark.slow
def test_threads_go_on_after_the_main_thread(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    program = THREADS.format(
        folder=str(find_checkpoint(Path("ckpt/chatglm3-tiny"))), sessions=str(tmp_path / "sessions")
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout == "40 stop 40 [3, 3] 40 None\n", ended.stderr


RUNNING = """
from glm_multiuser import MultiUserLLM, SamplingParams

llm = MultiUserLLM.from_pretrained({folder!r}, users=2, seq_length=512, progress=lambda *told: None)
params = SamplingParams(max_tokens=400, ignore_eos=True)
handles = [llm.submit([5, 6, 7], user=user, params=params) for user in range(2)]
next(handles[0])
"""


@pytest.mark.slow
def test_a_script_may_end_while_requests_run() -> None:
    program = RUNNING.format(folder=str(find_checkpoint(DEFAULT_CHECKPOINT)))
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
