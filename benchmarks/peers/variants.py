"""The variants of our engine and of its peers, and the pairs to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    Attributes:
        label: its name in the table.
        environment: the Python environment: "own", "torch" or "openvino".
        worker: the file that measures it.
        weights: one of `WEIGHT_BYTES`; selects the roofline.
        cache_bytes: bytes per number in its KV cache.
        settings: for the worker.
        slow: measured with few users only, because many take minutes.
        line: line style in the plot.
        models: supported models: "random" weights, a "file", or both.
    """

    label: str
    environment: str
    worker: str
    weights: str
    cache_bytes: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False
    line: Mapping[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ("random",)


BOTH = ("random", "file")


def engine(
    label: str,
    kernels: str,
    weights: str,
    cache_bytes: int,
    inputs: str = "",
    models: tuple[str, ...] = BOTH,
    **line: str,
) -> Variant:
    # "stored": the engine's default, the types in the file.
    settings = {"kernels": kernels, "weight_dtype": None if weights == "stored" else weights}
    if inputs:
        settings["compute_dtype"] = inputs
    return Variant(
        label, "own", "engine_worker.py", weights, cache_bytes, settings, False, line, models
    )


def llama_cpp(kind: str, weights: str, **line: str) -> Variant:
    # Its cache defaults to float16 for all weight types.
    return Variant(
        f"llama.cpp {kind.upper()}",
        "own",
        "llama_cpp_worker.py",
        weights,
        2,
        settings={"kind": kind},
        line=line,
    )


def of_file(label: str, environment: str, worker: str, cache_bytes: int, **more: Any) -> Variant:
    """A variant that computes with a GGUF file as stored."""
    return Variant(label, environment, worker, "stored", cache_bytes, models=("file",), **more)


def openvino(label: str, properties: Mapping[str, str], **line: str) -> Variant:
    # Its cache defaults to uint8.
    settings = {"properties": properties}
    return of_file(label, "openvino", "openvino_worker.py", 1, settings=settings, line=line)


def torch(label: str, weights: str, batching: str, slow: bool = False, **line: str) -> Variant:
    settings = {"dtype": weights, "batching": batching}
    cache = 4 if weights == "float32" else 2
    return Variant(label, "torch", "torch_worker.py", weights, cache, settings, slow, line)


OURS, LLAMA, TORCH, OPENVINO = "tab:blue", "tab:red", "tab:green", "tab:purple"

VARIANTS = {
    "portable": engine(
        "ours, portable", "portable", "float32", 4, models=("random",), color=OURS, linestyle=":"
    ),
    "native-stored": engine(
        "ours, native, as stored", "native", "stored", 4, models=("file",), color=OURS, marker="D"
    ),
    "native-stored-bf16": engine(
        "ours, native, as stored, inputs bfloat16",
        "native",
        "stored",
        2,
        inputs="bfloat16",
        models=("file",),
        color=OURS,
        marker="D",
        linestyle="--",
    ),
    "native-stored-int8": engine(
        "ours, native, as stored, inputs int8",
        "native",
        "stored",
        2,
        inputs="int8",
        models=("file",),
        color=OURS,
        marker="d",
        linestyle="--",
    ),
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
        2,
        inputs="bfloat16",
        color=OURS,
        marker="s",
        linestyle="-.",
    ),
    "native-int8": engine(
        "ours, native int8", "native", "int8", 2, color=OURS, marker="^", linestyle="--"
    ),
    "native-int8-int8": engine(
        "ours, native int8, inputs int8", "native", "int8", 2, inputs="int8", color=OURS, marker="P"
    ),
    "native-int4": engine("ours, native int4", "native", "int4", 4, color=OURS, marker="x"),
    "native-int4-int8": engine(
        "ours, native int4, inputs int8", "native", "int4", 2, inputs="int8", color=OURS, marker="X"
    ),
    "llama-f32": llama_cpp("f32", "float32", color=LLAMA),
    "llama-bf16": llama_cpp("bf16", "bfloat16", color=LLAMA, marker="s", linestyle="-."),
    "llama-q8": llama_cpp("q8_0", "int8", color=LLAMA, marker="^", linestyle="--"),
    "llama-q4_0": llama_cpp("q4_0", "q4_0", color=LLAMA, marker="x"),
    "llama-q4_1": llama_cpp("q4_1", "q4_1", color=LLAMA, marker="D", linestyle=":"),
    "llama-file": of_file(
        "llama.cpp, as stored",
        "own",
        "llama_cpp_worker.py",
        2,
        line={"color": LLAMA, "marker": "D"},
    ),
    "openvino-f32": openvino(
        "OpenVINO, inputs float32", {"INFERENCE_PRECISION_HINT": "f32"}, color=OPENVINO
    ),
    "openvino": openvino("OpenVINO, defaults", {}, color=OPENVINO, linestyle="--"),
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
    ("native-int8-int8", "llama-q8"),
    ("native-int4", "llama-q4_0"),
    ("native-int4-int8", "llama-q4_0"),
    ("native-int4", "llama-q4_1"),
    ("native-stored", "llama-file"),
    ("native-stored-int8", "llama-file"),
    ("native-stored", "openvino-f32"),
    ("native-stored", "openvino"),
    ("native-stored-bf16", "openvino"),
    ("native-stored-int8", "openvino-f32"),
    ("native-stored-int8", "openvino"),
    ("native-f32", "openvino-f32"),
    ("native-bf16", "openvino"),
    ("native-int8", "openvino"),
    ("native-f32", "torch-f32"),
    ("native-bf16", "torch-bf16"),
    ("native-f32", "mindformers"),
    ("portable", "llama-f32"),
    ("portable", "torch-f32"),
    ("portable", "torch-cb"),
    ("portable", "mindformers"),
)
"""Pairs whose rates are compared as ratios per round."""


def variants_of(model: str) -> list[str]:
    """The variants that can run a "random" model, or a "file"."""
    return [name for name, variant in VARIANTS.items() if model in variant.models]
