"""What is measured side by side: engines of ours and of the peers, and which are pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    Attributes:
        label: its name in the table.
        environment: whose Python runs it: "own", "torch" or "llama_cpp".
        worker: the file that measures it.
        weights: "float32", "float16", "bfloat16" or "int8": the roofline that it is held against.
        cache_bytes: of one number in its key/value cache.
        settings: for the worker.
        slow: whether it is measured with few users only, because it takes minutes with many.
        line: how the plot draws it.
    """

    label: str
    environment: str
    worker: str
    weights: str
    cache_bytes: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False
    line: Mapping[str, str] = field(default_factory=dict)


def engine(
    label: str, kernels: str, weights: str, cache_bytes: int, inputs: str = "", **line: str
) -> Variant:
    settings = {"kernels": kernels, "weight_dtype": weights}
    if inputs:
        settings["compute_dtype"] = inputs
    return Variant(
        label, "own", "engine_worker.py", weights, cache_bytes, settings=settings, line=line
    )


def llama_cpp(kind: str, weights: str, **line: str) -> Variant:
    # Its cache is float16 unless asked otherwise, whatever the weights are.
    return Variant(
        f"llama.cpp {kind.upper()}",
        "own",
        "llama_cpp_worker.py",
        weights,
        2,
        settings={"kind": kind},
        line=line,
    )


def torch(label: str, weights: str, batching: str, slow: bool = False, **line: str) -> Variant:
    settings = {"dtype": weights, "batching": batching}
    cache = 4 if weights == "float32" else 2
    return Variant(label, "torch", "torch_worker.py", weights, cache, settings, slow, line)


OURS, LLAMA, TORCH = "tab:blue", "tab:red", "tab:green"

VARIANTS = {
    "portable": engine("ours, portable", "portable", "float32", 4, color=OURS, linestyle=":"),
    "native-f32": engine("ours, native float32", "native", "float32", 4, color=OURS),
    "native-f16": engine(
        "ours, native float16, inputs float32", "native", "float16", 4, color=OURS, marker="v"
    ),
    "native-bf16-f32": engine(
        "ours, native bfloat16, inputs float32", "native", "bfloat16", 4, color=OURS, marker="o"
    ),
    "native-bf16": engine(
        "ours, native bfloat16",
        "native",
        "bfloat16",
        4,
        inputs="bfloat16",
        color=OURS,
        marker="s",
        linestyle="-.",
    ),
    "native-int8": engine(
        "ours, native int8", "native", "int8", 4, color=OURS, marker="^", linestyle="--"
    ),
    "llama-f32": llama_cpp("f32", "float32", color=LLAMA),
    "llama-bf16": llama_cpp("bf16", "bfloat16", color=LLAMA, marker="s", linestyle="-."),
    "llama-q8": llama_cpp("q8_0", "int8", color=LLAMA, marker="^", linestyle="--"),
    "torch-f32": torch("PyTorch float32, static batch", "float32", "static", color=TORCH),
    "torch-bf16": torch(
        "PyTorch bfloat16, static batch",
        "bfloat16",
        "static",
        color=TORCH,
        marker="s",
        linestyle="-.",
    ),
    "torch-cb": torch(
        "PyTorch float32, continuous",
        "float32",
        "continuous",
        slow=True,
        color="tab:olive",
        linestyle=":",
    ),
    "mindformers": Variant(
        "MindFormers, patched",
        "own",
        "mindformers_side.py",
        "float32",
        4,
        slow=True,
        line={"color": "tab:orange"},
    ),
}

PAIRS = (
    ("native-f16", "native-f32"),
    ("native-bf16-f32", "native-f32"),
    ("native-f32", "portable"),
    ("native-f32", "llama-f32"),
    ("native-bf16", "llama-bf16"),
    ("native-int8", "llama-q8"),
    ("native-f32", "torch-f32"),
    ("native-bf16", "torch-bf16"),
    ("native-f32", "mindformers"),
    ("portable", "llama-f32"),
    ("portable", "torch-f32"),
    ("portable", "torch-cb"),
    ("portable", "mindformers"),
)
"""Whose rates are divided by each other's, round by round."""
