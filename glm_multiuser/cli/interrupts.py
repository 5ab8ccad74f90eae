"""Ctrl-C as Python programs know it, although MindSpore takes the signal for itself.

While it compiles or runs a graph, MindSpore puts a C handler of its own in the place of Python's,
and that one ends the process with SIGTERM: nothing is closed, and the terminal keeps whatever state
it was in. So the signal is blocked in every thread, where no handler can see it, and one thread
waits for it and tells Python. Python's own handler then runs as ever: KeyboardInterrupt, or what
else was set with `signal.signal`.
"""

from __future__ import annotations

import _thread
import signal
import threading


def keep_ctrl_c() -> None:
    """Call it on the main thread, before MindSpore is imported and before threads are started."""
    main_thread = threading.get_ident()
    # Does nothing; it only wakes the main thread from a blocking call.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def forward() -> None:
        while True:
            signal.sigwait({signal.SIGINT})
            _thread.interrupt_main()
            signal.pthread_kill(main_thread, signal.SIGUSR1)

    threading.Thread(target=forward, name="ctrl-c", daemon=True).start()
