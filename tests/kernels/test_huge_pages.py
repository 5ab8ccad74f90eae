"""Systems that refuse advice about memory."""

from __future__ import annotations

import errno
import mmap

import pytest

from glm_multiuser.huge_pages import advise_huge_pages


class Refusing(mmap.mmap):
    number = errno.EINVAL

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        raise OSError(self.number, "refused")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
@pytest.mark.parametrize("wanted", [True, False])
def test_without_huge_pages_there_are_usual_ones(wanted: bool) -> None:
    memory = Refusing(-1, mmap.PAGESIZE)
    advise_huge_pages(memory, wanted)
    memory.number = errno.EACCES
    with pytest.raises(OSError, match="refused"):
        advise_huge_pages(memory, wanted)
