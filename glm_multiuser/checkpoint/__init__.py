"""Checkpoints in Hugging Face layout and of MindFormers: reading them into the model, writing them.

`huggingface.py` and `ckpt_file.py` find and open the files, `name_maps.py` knows what each family
calls its tensors and how it lays them out, `glm.py` brings them together for ChatGLM-6B.
`convert.py` makes one kind of checkpoint from the other.
"""

from glm_multiuser.checkpoint.generation_defaults import read_generation_defaults
from glm_multiuser.checkpoint.glm import load_glm, write_huggingface, write_mindformers
from glm_multiuser.checkpoint.huggingface import read_tensors

__all__ = [
    "load_glm",
    "read_generation_defaults",
    "read_tensors",
    "write_huggingface",
    "write_mindformers",
]
