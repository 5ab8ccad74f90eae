"""Reads and writes checkpoints in Hugging Face layout and MindFormers' `.ckpt`; reads GGUF files.

`huggingface.py` and `ckpt_file.py` find the files, `safetensors_file.py` and `torch_file.py` open
them. `layouts/` has one module per published layout, which maps its tensors to our parameters.
`matching.py` checks names and shapes, `loading.py` loads a model from tensors and saves it.
`convert.py` converts between checkpoint formats, `hub.py` downloads a checkpoint by name.
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
