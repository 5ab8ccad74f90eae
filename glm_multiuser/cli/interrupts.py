"""Ctrl-C ends a command at any moment, with one line on stderr and exit code 130.

While it compiles or runs a graph, MindSpore replaces Python's handler by its own C handler, which
ends the process with SIGTERM. Otherwise, KeyboardInterrupt may be raised during an import, and
MindSpore's threads abort when the interpreter exits. So all threads block the signal, which
disables handlers, and one thread waits for it. It ends the process, unless the main thread is in
`raised`, or another handler was set with `signal.signal` or by asyncio: then Python runs that
handler as usual.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as all of the above
    from collections.abc import Iterator
    from typing import Callable, NoReturn

INTERRUPTED = 130
"""Exit code after SIGINT, as in shells."""

AGAIN_SECONDS = 0.05
"""Interval in which the main thread is woken until it has acted."""

SHOW_CURSOR = b"\x1b[?25h"

_texts: list[Callable[[], str]] = [lambda: "interrupted"]
_raises = False


def keep_ctrl_c() -> None:
    """Call it on the main thread, before importing MindSpore and before starting threads."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    main_thread = threading.get_ident()
    pending = False

    def wake(number: int, frame: object) -> None:
        # Also wakes the main thread from a blocking call. Python 3.9 fails if a handler raises
        # while another signal has arrived, so this one raises by itself.
        nonlocal pending
        was_pending, pending = pending, False
        if was_pending and _raises:
            raise KeyboardInterrupt

    def wait() -> None:
        nonlocal pending
        while True:
            signal.sigwait({signal.SIGINT})
            if not _raises:
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    end()
                _thread.interrupt_main()
            pending = True
            # A signal just before a blocking call is only noted, and the call does not return.
            while pending and signal.SIGINT not in signal.sigpending():
                signal.pthread_kill(main_thread, signal.SIGUSR1)
                time.sleep(AGAIN_SECONDS)

    signal.signal(signal.SIGUSR1, wake)
    threading.Thread(target=wait, name="ctrl-c", daemon=True).start()


@contextmanager
def raised() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt inside the block, for code that must clean up."""
    global _raises
    _raises = True
    try:
        yield
    finally:
        _raises = False


@contextmanager
def saying(text: Callable[[], str]) -> Iterator[None]:
    """Sets the line that Ctrl-C prints inside the block."""
    _texts.append(text)
    try:
        yield
    finally:
        _texts.remove(text)


def end() -> NoReturn:
    """Ends this process and its children, without unwinding: nothing may wait for the device."""
    try:
        for child in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for terminal in filter(os.isatty, (1, 2)):
            os.write(terminal, SHOW_CURSOR + b"\n" * (terminal == 2))
        os.write(2, f"{_texts[-1]()}\n".encode(errors="replace"))
    finally:
        os._exit(INTERRUPTED)


def _descendants(process: int) -> list[int]:
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *_descendants(child)]
    return found
