"""Ctrl-C at any moment of any command: exit code 130, one line, and no process is left."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glm_multiuser.cli.interrupts import INTERRUPTED
from tests.cli.fake import WITH_FAKE_MODEL
from tests.engine.driving import wait_until
from tests.server.process import ROOT

GLM_TINY = ROOT / "ckpt" / "glm-tiny"
SMALL = "--hidden=64 --layers=2 --inner=128 --heads=2 --vocab=256 --new-tokens=64 --no-plot"
COMMANDS = {
    "demo": "demo --users 2",
    "chat": "chat --users 1",
    "generate": "generate prompts.txt --out answers.jsonl",
    "serve": "serve --port 0",
    "bench": f"bench --users 1,2 {SMALL}",
    "plan": "plan --sweep",
    "selfcheck": "selfcheck",
    "convert": f"convert {GLM_TINY} converted",
    "patch": "patch --list",
}
SAMPLE = (
    ("plan", 0.0),
    ("patch", 0.2),
    ("convert", 0.4),
    ("selfcheck", 0.8),
    ("serve", 1.2),
    ("demo", 1.6),
    ("chat", 2.0),
    ("bench", 2.6),
    ("generate", 3.2),
)
STEP, STEPS = 0.2, 40
END_SECONDS = 60.0
LAST_SECONDS = 3.0
"""Of work, generous: from the last statement of a command to the end of its process."""

UNHEARD = """
import signal
from glm_multiuser.cli.interrupts import keep_ctrl_c, raised

send = signal.pthread_kill
sent = []

def lose_the_first(thread, number):
    sent.append(number)
    if len(sent) > 1:
        send(thread, number)

signal.pthread_kill = lose_the_first
keep_ctrl_c()
with raised():
    signal.raise_signal(signal.SIGUSR1)
    try:
        print("waits", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        signal.raise_signal(signal.SIGUSR1)
        print("interrupted once")
"""
"""The first signal that tells the main thread is lost, as one between a prompt and its `select`."""


@contextmanager
def started(command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, once it handles Ctrl-C.

    Before that is Python's own start, which nothing can change.
    """
    (folder / "prompts.txt").write_text("who are you?\n" * 2000, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "glm_multiuser.cli", *COMMANDS[command].split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )
    try:
        while process.poll() is None and not blocks_interrupts(process.pid):
            time.sleep(0.002)
        yield process
    finally:
        for one in group(process.pid):
            os.kill(one, signal.SIGKILL)
        process.communicate()


def listen() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def blocks_interrupts(process: int) -> bool:
    """Whether SIGINT is blocked in its first thread, as `keep_ctrl_c` does it."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (blocked,) = (line.split()[1] for line in lines if line.startswith("SigBlk"))
    return bool(int(blocked, 16) & 1 << (signal.SIGINT - 1))


def group(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(process_group) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def work(leader: int) -> float:
    """Processor seconds of a process group so far, with processes of it that have ended: unlike a
    wait, no longer on a busy machine."""
    ticks = 0
    for one in group(leader):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def work_of_children() -> float:
    """Of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def remaining(leader: int) -> list[int]:
    """The processes of a group that are not ending, either: what is killed takes a moment."""
    until = time.monotonic() + END_SECONDS
    while group(leader) and time.monotonic() < until:
        time.sleep(0.01)
    return group(leader)


def interrupt(command: str, folder: Path, seconds: float) -> bool:
    """Ctrl-C after so many seconds; False if the command had ended by then."""
    others = work_of_children()
    with started(command, folder) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            others += work(process.pid)
            process.send_signal(signal.SIGINT)
        else:
            assert process.returncode == 0
            return False
        _, text = process.communicate(timeout=END_SECONDS)
        took = work_of_children() - others
        where = f"{command} after {seconds:.1f} s, in {took:.1f} s:\n{text}"
        assert "Traceback" not in text, where
        assert "Fatal" not in text, where
        if command == "serve" and process.returncode == 0:
            assert "shutdown requested" in text, where  # it listened: a graceful shutdown
        elif process.returncode == 0:
            assert took < LAST_SECONDS, where  # it was about to end
        else:
            assert process.returncode == INTERRUPTED, where
            assert text.count("interrupted") == 1, where
            assert text.splitlines()[-1].startswith("interrupted"), where
        assert remaining(process.pid) == []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert [path.name for path in folder.glob("*.jsonl") if not path.stat().st_size] == []
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("command", "seconds"), SAMPLE)
def test_one_line_and_130(tmp_path: Path, command: str, seconds: float) -> None:
    interrupt(command, tmp_path, seconds)


@pytest.mark.rare
@pytest.mark.parametrize("command", COMMANDS)
def test_every_moment_of_the_first_eight_seconds(tmp_path: Path, command: str) -> None:
    for step in range(STEPS):
        folder = tmp_path / str(step)
        folder.mkdir()
        if not interrupt(command, folder, step * STEP):
            break


def test_a_chat_on_a_terminal_goes_on() -> None:
    master, terminal = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", WITH_FAKE_MODEL, "chat"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=listen,
    )
    os.close(terminal)
    try:
        read_until(master, b"alice> ")
        # Between the prompt and the wait for a key Python notes a signal, but does not act on it.
        wait_until(lambda: is_waiting(child.pid))
        child.send_signal(signal.SIGINT)
        read_until(master, b"/quit or Ctrl-D ends the chat")
        os.write(master, b"who?\n")
        read_until(master, b"?ohw")
        os.write(master, b"/quit\n")
        assert child.wait(END_SECONDS) == 0
    finally:
        child.kill()
        child.wait()
        os.close(master)


def test_a_ctrl_c_that_the_main_thread_misses_is_told_again_and_raised_once() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", UNHEARD],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=listen,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "waits\n"
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate(timeout=END_SECONDS)
        assert (said, child.returncode) == ("interrupted once\n", 0)
    finally:
        child.kill()
        child.communicate()


def is_waiting(pid: int) -> bool:
    """Whether the main thread of a process sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def read_until(terminal: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], END_SECONDS)
        assert ready, seen
        seen += os.read(terminal, 1024)
