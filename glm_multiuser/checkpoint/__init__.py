"""Checkpoints in Hugging Face layout and of MindFormers: reading them into the model, writing them.

`huggingface.py` and `ckpt_file.py` find the files, `safetensors_file.py` and `torch_file.py` open
them. `layouts/` has one module per published layout: what it calls its tensors, and where they go.
`matching.py` checks that they fit, `loading.py` reads them into a model and writes them from one.
`convert.py` makes one kind of checkpoint from the other, `hub.py` downloads one by its name.
"""

from glm_multiuser.checkpoint.families import (
    read_end_ids,
    read_generation_defaults,
    read_model_config,
)
from glm_multiuser.checkpoint.huggingface import read_tensors
from glm_multiuser.checkpoint.loading import (
    check_tensors,
    load_checkpoint,
    stored_as,
    write_huggingface,
    write_mindformers,
)

__all__ = [
    "check_tensors",
    "load_checkpoint",
    "read_end_ids",
    "read_generation_defaults",
    "read_model_config",
    "read_tensors",
    "stored_as",
    "write_huggingface",
    "write_mindformers",
]
