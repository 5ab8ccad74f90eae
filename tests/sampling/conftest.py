"""Widths of the folds: as they are, and so small that small vocabularies need them too."""

from __future__ import annotations

import pytest

from glm_multiuser import sampling, sampling_rows


@pytest.fixture(params=["as they are", "small"], scope="module")
def widths(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "small":
            patch.setattr(sampling_rows, "BOUND_COLUMNS", 23)
            patch.setattr(sampling_rows, "WALK_COLUMNS", 3)
            patch.setattr(sampling_rows, "PLAIN_COLUMNS", 7)
            patch.setattr(sampling_rows, "NARROW", 21)
            patch.setattr(sampling, "NARROW", 21)
        yield request.param
