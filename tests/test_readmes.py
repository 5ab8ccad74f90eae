"""Numbers, links and names in README.md and README_CN.md agree line by line."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IN_CHINESE = {"四百万": "4", "1.35 亿": "135", "67.1 亿": "6.71", "60 亿": "6"}
"""Numbers that the two languages count differently."""
COMPARED = {
    "numbers": re.compile(r"(?<![A-Za-z\d.])\d+(?:[,.]\d+)*"),
    "links": re.compile(r"\]\(((?!README|#)[^)\s]+)\)"),
    "names": re.compile(r"`([^`\n]+)`"),
}
ONLY_CHINESE = {"docs/"}  # it says that these pages are in English


def lines() -> list[tuple[str, str]]:
    english, chinese = (
        (ROOT / name).read_text(encoding="utf-8").splitlines()
        for name in ("README.md", "README_CN.md")
    )
    assert len(english) == len(chinese)
    for there, here in IN_CHINESE.items():
        chinese = [line.replace(there, here) for line in chinese]
    return list(zip(english, chinese))


def differences(what: str, pairs: list[tuple[str, str]]) -> list[tuple[Counter[str], Counter[str]]]:
    """Differences between the lines of the two languages."""
    found = []
    for pair in pairs:
        english, chinese = (Counter(COMPARED[what].findall(line)) for line in pair)
        for one in ONLY_CHINESE:
            chinese.pop(one, None)
        if english != chinese:
            found.append((english - chinese, chinese - english))
    return found


@pytest.mark.parametrize("what", COMPARED)
def test_both_have_the_same(what: str) -> None:
    assert differences(what, lines()) == []


def test_a_difference_is_seen() -> None:
    pair = ("1.2 times [a](docs/a.md) `x`", "1.3 倍")
    assert all(differences(what, [pair]) for what in COMPARED)
