"""Advice to the system about huge pages of memory (madvise(2))."""

from __future__ import annotations

import errno
import mmap


def advise_huge_pages(memory: mmap.mmap, wanted: bool) -> None:
    """Asks for huge pages, or for none; without effect where the system does not know them."""
    advice = getattr(mmap, "MADV_HUGEPAGE" if wanted else "MADV_NOHUGEPAGE", None)
    if advice is None:
        return
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
