"""In the child: a model of MindFormers with the weights of a folder in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindformers import GLMChatModel, GLMConfig
from mindspore import Tensor
from safetensors.numpy import load_file

SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "inner_hidden_size",
    "layernorm_epsilon",
    "bos_token_id",
    "eos_token_id",
    "mask_token_id",
    "gmask_token_id",
    "pad_token_id",
)


def make_model(folder: str, use_past: bool = True, **settings: Any) -> GLMChatModel:
    """Makes a float32 model.

    Args:
        folder: with `config.json` and `model.safetensors`.
        use_past: whether it caches keys and values.
        settings: more of `GLMConfig`.
    """
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    theirs = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    config = GLMConfig(
        num_heads=theirs["num_attention_heads"],
        use_past=use_past,
        param_init_type="float32",
        compute_dtype="float32",
        **{name: theirs[name] for name in SAME_NAMES},
        **settings,
    )
    model = GLMChatModel(config)
    model.set_train(False)
    parameters = {one.name: one for one in model.get_parameters() if "past" not in one.name}
    for name, values in load_file(str(Path(folder) / "model.safetensors")).items():
        if not name.endswith("inv_freq"):  # which MindFormers computes
            parameter = parameters.pop(their_name(name))
            assert parameter.shape == values.shape, name
            parameter.set_data(Tensor(values.astype(np.float32)))
    assert not parameters
    return model


def their_name(name: str) -> str:
    """What MindFormers calls a weight of Hugging Face's."""
    if "layernorm" in name:
        return name.replace(".weight", ".gamma").replace(".bias", ".beta")
    return name.replace("word_embeddings.weight", "word_embeddings.embedding_table")
