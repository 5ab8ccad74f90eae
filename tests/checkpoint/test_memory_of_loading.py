"""Loading needs the memory of the weights, and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from glm_multiuser.backends.native import library
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.checkpoint.layouts import transformers
from glm_multiuser.checkpoint.safetensors_file import save_safetensors
from tests.checkpoint.folders import GLM4, write_json

VALUES = {
    **GLM4,
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "head_dim": 64,
    "intermediate_size": 2816,
}
"""151 million numbers, 8 of them in each of the two largest parameters."""

WATCH = """
import json, sys, threading
from pathlib import Path
import numpy as np
from glm_multiuser.checkpoint import load_checkpoint, read_model_config, read_tensors
from glm_multiuser.checkpoint.families import parameter_shapes

def anonymous():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

folder = Path(sys.argv[1])
config = read_model_config(folder)
done, watcher = threading.Event(), threading.Thread(target=watch)
"""

MEASURE = (
    WATCH
    + """
if sys.argv[2] == "bin":
    import torch
before = peak = anonymous()
model = {name: np.ones(shape, np.float16) for name, shape in parameter_shapes(config).items()}
watcher.start()
load_checkpoint(
    folder,
    config,
    {name: (one.shape, one.dtype) for name, one in model.items()},
    lambda name, values: np.copyto(model[name], values),
)
done.set()
watcher.join()
right = all(bool((one.reshape(-1)[::97] == 0.5).all()) for one in model.values())
print(json.dumps([sum(one.nbytes for one in model.values()), peak - before, right]))
"""
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: make torch")
def test_peak_of_both_formats(tmp_path: Path) -> None:
    """bfloat16 as published, float16 as wanted, and rows of one parameter from three tensors."""
    import torch
    from safetensors.torch import save_file

    config = transformers.GLM4.read_config(VALUES)
    shapes = parameter_shapes(config)
    tensors = {
        name: torch.full(place.shape(shapes), 0.5, dtype=torch.bfloat16)
        for name, place in transformers.GLM4.placements(config).items()
        if place
    }
    folders = {"bin": tmp_path / "bin", "safetensors": tmp_path / "safetensors"}
    for folder in folders.values():
        folder.mkdir()
        write_json(folder / "config.json", VALUES)
    torch.save(tensors, folders["bin"] / "pytorch_model.bin")
    save_file(tensors, folders["safetensors"] / "model.safetensors")
    for kind, folder in folders.items():
        child = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder), kind], capture_output=True, text=True
        )
        assert child.returncode == 0, child.stderr
        weights, peak, right = json.loads(child.stdout)
        assert right
        assert weights > 290e6
        assert peak < 1.15 * weights, f"{kind}: {peak / weights:.3f} of {weights} bytes"


MEASURE_PACKED = (
    WATCH
    + """
from glm_multiuser import device
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.build import make_model
from glm_multiuser.weights import allocate, load_weights, weights_of
device.configure("CPU", 0)
model = make_model(config, NativeBackend(sys.argv[2]))
before = peak = anonymous()
watcher.start()
memory = allocate({name: one.stored for name, one in weights_of(model).items()})
load_weights(folder, config)(weights_of(model, memory), lambda done, total, what: None)
done.set()
watcher.join()
after = anonymous()
peak = max(peak, after)  # the last pages may have come since it was looked at
print(json.dumps([sum(one.nbytes for one in memory.values()), peak - before, after - before]))
"""
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
@pytest.mark.skipif(bool(library.unavailable_reason("CPU")), reason="no native kernels")
def test_peak_of_packed_weights(tmp_path: Path) -> None:
    """In the type of the file, and widened; a model's memory is there once it is written to."""
    config = transformers.GLM4.read_config(VALUES)
    shapes = parameter_shapes(config)
    places = transformers.GLM4.placements(config).items()
    sizes = {name: (one.shape(shapes), np.dtype(np.float16)) for name, one in places if one}
    tensors = ((name, np.full(shape, 0.5, dtype)) for name, (shape, dtype) in sizes.items())
    save_safetensors(tmp_path / "model.safetensors", sizes, tensors)
    write_json(tmp_path / "config.json", VALUES)
    for dtype in ("float16", "float32"):
        child = subprocess.run(
            [sys.executable, "-c", MEASURE_PACKED, str(tmp_path), dtype],
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stderr
        weights, peak, after = json.loads(child.stdout.splitlines()[-1])
        assert weights > 290e6
        assert 0.95 * weights < after
        assert peak < 1.15 * weights, f"{dtype}: {peak / weights:.3f} of {weights} bytes"
