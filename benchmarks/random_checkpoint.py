"""Checkpoints of any shape with random weights, for benchmarks that load a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from glm_multiuser.checkpoint import write_huggingface
from glm_multiuser.checkpoint.layouts import chatglm_6b
from glm_multiuser.cli.loading import DEFAULT_CHECKPOINT, find_checkpoint
from glm_multiuser.model_config import ModelConfig

TOKENIZER_FILES = ("ice_text.model", "tokenizer_config.json")
TOKENIZER_FIELDS = (
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "mask_token_id",
    "gmask_token_id",
    "pad_token_id",
)


def write_random_weights(folder: Path, shape: Mapping[str, int], seed: int = 0) -> None:
    """Writes normally distributed matrices, and norms and biases as initialised by the model.

    The variance keeps each sum over inputs at the scale of one input. With the small values of a
    new model, and weaker attention, the last token alone determines the next one: all users get
    the same answer, and mixed-up users go unnoticed.
    """
    config = {"model_type": "chatglm", "position_encoding_2d": True, **shape}
    random = np.random.default_rng(seed)
    arrays = {}
    for name, size in chatglm_6b.shapes(ModelConfig.from_dict(config)).items():
        inputs = shape["inner_hidden_size" if "4h_to_h" in name else "hidden_size"]
        spread = (3 if "query_key_value" in name else 1) / inputs**0.5
        if len(size) > 1:
            arrays[name] = random.standard_normal(size, dtype=np.float32) * np.float32(spread)
        else:
            arrays[name] = np.full(size, name.endswith("gamma"), np.float32)
    write_huggingface(folder, config, arrays)


def write_random_chat_model(folder: Path, shape: Mapping[str, int]) -> None:
    """The same with glm-tiny's tokenizer and vocabulary: accepts text, answers are meaningless."""
    small = find_checkpoint(DEFAULT_CHECKPOINT)
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    vocabulary = {name: config[name] for name in TOKENIZER_FIELDS}
    write_random_weights(folder, {**shape, **vocabulary})
    for name in TOKENIZER_FILES:
        shutil.copy(small / name, folder / name)
