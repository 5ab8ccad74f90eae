"""The kernel kind of each operator with O0, stored in a file for the table in docs/ascend.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = Path(__file__).resolve().with_suffix(".json")


def recorded() -> dict[str, str]:
    """Kinds by operator, as written by the last dry run with `--write`."""
    kinds: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return kinds


def write(kinds: Mapping[str, str]) -> None:
    FILE.write_text(json.dumps(kinds, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def of(found: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Kinds by operator; both kinds where graphs or cards differ."""
    kinds: dict[str, set[str]] = {}
    for one in found:
        for name, kind in one.items():
            kinds.setdefault(name, set()).add(kind)
    return {name: ", ".join(sorted(kinds[name])) for name in sorted(kinds)}


def differences(found: Mapping[str, str], kept: Mapping[str, str], is_part: bool) -> list[str]:
    """Differences from the stored kinds, one sentence per operator; a part may lack operators."""
    names = found if is_part else {**kept, **found}
    return [
        f"{name}: the kernel is {found.get(name, 'none')}, recorded is {kept.get(name, 'none')}"
        for name in sorted(names)
        if found.get(name) != kept.get(name)
    ]
