"""Tests ChatGLM-6B at full size on this CPU: loading, compiling, and two concurrent users.

    python benchmarks/full_size.py [--variants native-int8,native-bfloat16,portable-float16]

Writes a checkpoint of the published shape (28 layers, hidden 4096, 6.7 billion parameters) with
fixed random float16 weights and loads it once per variant, each in its own process. Two users
decode concurrently, then each alone. The answers are meaningless; only their agreement counts. With
native kernels a second process maps the weights that the first one packed. Prints one line of JSON
at the end.

Needs 28 GB of disk, and the memory printed before loading. A variant that does not fit is rejected
before the machine swaps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.checkpoint.layouts import chatglm_6b
from glm_multiuser.checkpoint.safetensors_file import save_safetensors
from glm_multiuser.cli.conditions import machine
from glm_multiuser.cli.measure import fields
from glm_multiuser.cli.published import PUBLISHED
from glm_multiuser.config import EngineConfig
from glm_multiuser.memory import loading_bytes
from glm_multiuser.model_config import ModelConfig

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "native-int8": {"kernels": "native", "weight_dtype": "int8"},
    "native-float16": {"kernels": "native", "weight_dtype": "float16"},
    "native-bfloat16": {"kernels": "native", "weight_dtype": "bfloat16"},
    "portable-float16": {"kernels": "portable", "dtype": "float16"},
}
PACKED = "packed"
"""Subfolder of the checkpoint's folder."""

USERS = 2
PROMPT_TOKENS = 12
SPARE_BYTES = 2 * 10**9
"""Reserved for other processes."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here and use it again")
    parser.add_argument("--layers", type=int, default=28, help="fewer than 28 to try the script")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=6)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child, options)))
        return
    variants = options.variants.split(",")
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown:
        parser.error(f"--variants has {unknown[0]!r}; it must be of {', '.join(VARIANTS)}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="full_size_"))
    try:
        seconds = write_checkpoint(folder, options.layers)
        layers = ModelConfig.from_folder(folder).num_layers
        runs = [run for name in variants for run in starts(name, folder, options)]
    finally:
        shutil.rmtree(folder / PACKED, ignore_errors=True)
        if options.folder is None:
            shutil.rmtree(folder)
    conditions = {
        **machine(),
        "layers": layers,
        "seq_length": options.seq_length,
        "users": USERS,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": options.new_tokens,
        "writing_s": seconds,
    }
    print(json.dumps({"conditions": conditions, "runs": runs}))


def write_checkpoint(folder: Path, layers: int) -> float:
    """Writes shards in Hugging Face layout, one per layer and two for the rest; returns seconds."""
    published = PUBLISHED["chatglm-6b"]
    config = {
        "model_type": "chatglm",
        "position_encoding_2d": True,
        "vocab_size": published.vocab_size,
        "hidden_size": published.hidden_size,
        "num_layers": layers,
        "num_attention_heads": published.num_attention_heads,
        "inner_hidden_size": published.inner_hidden_size,
        "max_sequence_length": published.max_sequence_length,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "config.json").exists():
        say(f"using the checkpoint that is in {folder}")
        return 0.0
    start = time.monotonic()
    model = ModelConfig.from_dict(config)
    shapes = chatglm_6b.shapes(model)
    shards: dict[str, list[str]] = {}
    for name in chatglm_6b.placements(model):
        words = name.split(".")
        shards.setdefault(words[2] if words[1] == "layers" else name.split(".")[-2], []).append(
            name
        )
    random = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for done, names in enumerate(shards.values()):
        file = f"model-{done + 1:05}-of-{len(shards):05}.safetensors"
        say(f"writing {file}", every=4, number=done)
        places = {name: shapes[chatglm_6b.placements(model)[name].name] for name in names}
        sizes = {name: (shape, np.dtype(np.float16)) for name, shape in places.items()}
        save_safetensors(folder / file, sizes, random_tensors(random, places))
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return round(time.monotonic() - start, 1)


def random_tensors(
    random: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Any]]:
    """Random weights whose sums keep the scale of an input, so float16 activations stay finite."""
    for name, shape in shapes.items():
        if len(shape) == 1:
            norm = "layernorm.weight" in name
            yield name, np.full(shape, norm, np.float16)
            continue
        spread = (3 if "query_key_value" in name else 1) / shape[1] ** 0.5
        values = np.empty(shape, np.float16)
        for first in range(0, len(values), 1024):
            block = values[first : first + 1024]
            block[:] = random.standard_normal(block.shape, np.float32) * np.float32(spread)
        yield name, values


def starts(variant: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs a first start, and a second one if packed weights were saved."""
    yield {"start": "first", **run_in_child(variant, folder, options)}
    for packed in (folder / PACKED).glob("*.safetensors"):
        began = time.monotonic()
        subprocess.run(["cat", str(packed)], stdout=subprocess.DEVNULL, check=True)
        read = {"packed_gb": round(packed.stat().st_size / 1e9, 2)}
        read["cat_s"] = round(time.monotonic() - began, 2)
        yield {"start": "second", **read, **run_in_child(variant, folder, options)}
        packed.unlink()


def run_in_child(variant: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs in its own process: memory freed by one variant would count for the next."""
    say(f"{variant}:")
    command = [sys.executable, __file__, "--child", variant, "--folder", str(folder)]
    for name in ("seq_length", "new_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        return {"variant": variant, "failed": f"exit code {child.returncode}"}
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    for name, value in found.items():
        say(f"  {name}: {value}")
    return found


def run(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Loads the model, generates answers, and measures."""
    settings = VARIANTS[variant]
    packed = str(options.folder / PACKED)
    engine = EngineConfig(
        users=USERS, seq_length=options.seq_length, weight_cache=packed, **settings
    )
    config = ModelConfig.from_folder(options.folder)
    needed = loading_bytes(config, engine)
    available = memory_fields("/proc/meminfo")["MemAvailable"]
    if available < needed + SPARE_BYTES:
        raise SystemExit(
            f"{variant} needs {needed / 1e9:.1f} GB while it loads and leaves "
            f"{SPARE_BYTES / 1e9:.0f} GB to others; {available / 1e9:.1f} GB are available"
        )
    say(f"  needs {needed / 1e9:.1f} GB while it loads, {available / 1e9:.1f} GB are available")
    with Watch() as watch:
        start = time.monotonic()
        llm = MultiUserLLM.from_pretrained(options.folder, progress=Narrator(watch), **vars(engine))
        started = time.monotonic() - start
        with llm:
            stats = llm.stats()
            together, alone, times = answers(llm, config, options.new_tokens)
            steady = watch.now()
            mapped = memory_fields("/proc/self/status")["RssFile"]
    first = [one[0] for one in times]
    gaps = [later - earlier for one in times for earlier, later in zip(one, one[1:])]
    return {
        "variant": variant,
        "same_alone_and_together": together == alone,
        "users_differ": together[0] != together[1],
        "tokens": together,
        "loading_s": round(started - stats.compile_seconds, 2),
        "compile_s": round(stats.compile_seconds, 1),
        "first_token_s": [round(one, 2) for one in first],
        "decode_step_s": round(float(np.median(gaps)), 3),
        "compiles_after_ready": stats.compiles_after_ready,
        "planned_loading_gb": round(needed / 1e9, 2),
        "loading_peak_gb": round(watch.peaks["loading"] / 1e9, 2),
        "running_peak_gb": round(max(watch.peaks.values()) / 1e9, 2),
        "steady_gb": round(steady / 1e9, 2),
        "mapped_gb": round(mapped / 1e9, 2),
        "peak_rss_gb": round(memory_fields("/proc/self/status")["VmHWM"] / 1e9, 2),
    }


def answers(
    llm: MultiUserLLM, config: ModelConfig, new_tokens: int
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Returns both users' tokens, concurrent and then alone, and the concurrent arrival times."""
    random = np.random.default_rng(1)
    ending = [config.gmask_token_id, config.bos_token_id]
    prompts = [
        [*random.integers(20, 100_000, PROMPT_TOKENS - len(ending)).tolist(), *ending]
        for _ in range(USERS)
    ]
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)

    def ask(user: int) -> tuple[list[int], list[float]]:
        start = time.monotonic()
        tokens: list[int] = []
        times = []
        with llm.submit(prompts[user], user=user, params=params) as handle:
            for piece in handle:
                tokens += piece.token_ids
                times += [time.monotonic() - start] * len(piece.token_ids)
        return tokens, times

    say("  two users at once ...")
    with ThreadPoolExecutor(USERS) as pool:
        together = list(pool.map(ask, range(USERS)))
    say("  each of them alone ...")
    alone = [ask(user)[0] for user in range(USERS)]
    return [tokens for tokens, _ in together], alone, [times for _, times in together]


class Watch:
    """Samples this process' memory continuously; pages of mapped files do not count."""

    def __init__(self) -> None:
        self.phase = "loading"
        self.peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def now(self) -> int:
        return memory_fields("/proc/self/status")["RssAnon"]

    def _look(self) -> None:
        while True:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now())
            if self._done.wait(0.02):
                return


class Narrator:
    """Reports the progress of loading and compiling."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.said = watch, 0.0

    def __call__(self, done: int, total: int, what: str) -> None:
        if not what.endswith("weights") and "." not in what:  # nor a parameter's name: a graph
            self.watch.phase = "compiling"
        if time.monotonic() - self.said > 5:
            self.said = time.monotonic()
            say(f"  {done}/{total} {what}, {self.watch.now() / 1e9:.1f} GB")


def memory_fields(path: str) -> dict[str, int]:
    """Sizes in one of Linux' /proc tables, in bytes."""
    text = Path(path).read_text(encoding="ascii")
    return {name: 1024 * value for name, value in fields(text).items()}


def say(text: str, every: int = 1, number: int = 0) -> None:
    if number % every == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
