"""Loads a checkpoint of either format into a MindFormers model, without an intermediate file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspore import Tensor

from glm_multiuser.backends.portable.types import numpy_type
from glm_multiuser.checkpoint import load_checkpoint
from glm_multiuser.checkpoint.layouts.chatglm_6b import mindformers_placements
from glm_multiuser.checkpoint.placement import to_their_layout
from glm_multiuser.checkpoint.stored_tensor import Array
from glm_multiuser.model_config import ChatGLM6BConfig
from glm_multiuser.progress import Progress


def load_weights(model: Any, folder: Path, config: ChatGLM6BConfig, progress: Progress) -> None:
    """Fills the parameters of a `GLMChatModel` that was created from the same `config`.

    The folder is in Hugging Face layout, or has MindFormers' `.ckpt`. Caches are not changed.
    `progress` is called with (tensors done, total, name of the next one).

    Raises:
        CheckpointError: the folder's weights do not match this model.
    """
    places = mindformers_placements(config)
    parameters = {one.name: one for one in model.get_parameters() if one.name in places}

    def assign(name: str, values: Array) -> None:
        theirs = to_their_layout(values, places[name], config.num_attention_heads)
        parameters[name].set_data(Tensor(theirs))

    wanted = {name: (one.shape, numpy_type(one.dtype)) for name, one in parameters.items()}
    load_checkpoint(folder, config, wanted, assign, progress)
