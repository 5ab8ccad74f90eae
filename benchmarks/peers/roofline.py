"""The roofline: this machine's peak rates, and the minimum time of a decode step."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

WEIGHT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int4": 148 / 256,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
}
"""Of four bits: with 16 more for the scale of every 32 weights, and for their minimum; int4 has 8
each, and 32 for 256 weights."""

OUTPUT_BYTES = {"int4": 210 / 256}
"""In the output layer, where they are others."""

PROGRAM = "roofline"

Roofline = Mapping[str, Any]
"""`read_gb_s`, and `gflops` by the kind of number."""


def measure_roofline(compiler: str, folder: Path) -> Roofline:
    """Compiles roofline.cpp for this CPU and runs it.

    Raises:
        RuntimeError: it does not compile or run.
    """
    source = str(Path(__file__).with_suffix(".cpp"))
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-std=c++17"]
    _run(compiler, *flags, source, "-o", str(folder / PROGRAM))
    return dict(json.loads(_run(str(folder / PROGRAM))))


def measure_reading(folder: Path) -> float:
    """Measures GB/s again, with the program from `measure_roofline`.

    Raises:
        RuntimeError: it does not run.
    """
    return float(json.loads(_run(str(folder / PROGRAM), "read"))["read_gb_s"])


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise RuntimeError((error.stderr.strip().splitlines() or [str(error)])[0]) from None


def weight_count(shape: Mapping[str, int]) -> int:
    """Parameters in the matrices that a decode step reads: the layers' and the output layer's. Of
    the embedding it reads only one row per user."""
    hidden, inner = shape["hidden_size"], shape["inner_hidden_size"]
    layer = 4 * hidden * hidden + 2 * hidden * inner
    return shape["num_layers"] * layer + shape["vocab_size"] * hidden


def weight_bytes(shape: Mapping[str, int], weights: str) -> float:
    """Bytes of the matrices that a decode step reads."""
    output = shape["vocab_size"] * shape["hidden_size"]
    per_weight = WEIGHT_BYTES[weights]
    in_layers = (weight_count(shape) - output) * per_weight
    return in_layers + output * OUTPUT_BYTES.get(weights, per_weight)


def step_seconds(
    roofline: Roofline,
    shape: Mapping[str, int],
    users: int,
    positions: float,
    weights: str,
    cache_bytes: int,
) -> float:
    """Minimum time of a decode step: reading the weights and all users' KV caches once, or
    computing, whichever is longer."""
    cached = 2 * shape["num_layers"] * shape["hidden_size"] * positions
    read = weight_bytes(shape, weights) + users * cached * cache_bytes
    # Query times key, and weight times value: a multiplication and an addition each.
    operations = 2 * users * (weight_count(shape) + cached)
    peaks = roofline["gflops"]
    in_groups = weights in ("int4", "q4_0", "q4_1")
    kind = "int8" if in_groups else weights  # 4-bit weights are multiplied as int8
    peak = peaks.get(kind, peaks["float32"])
    return max(read / roofline["read_gb_s"], operations / peak) / 1e9


def most_tokens(
    roofline: Optional[Roofline],
    shape: Mapping[str, int],
    users: int,
    positions: float,
    weights: str,
    cache_bytes: int,
) -> Optional[float]:
    """tok/s of all users at the roofline; None if it was not measured."""
    if roofline is None:
        return None
    return users / step_seconds(roofline, shape, users, positions, weights, cache_bytes)
