"""Checkpoint folders in Hugging Face layout: reading them into the model, and writing them.

`huggingface.py` finds and opens the files, `name_maps.py` knows what each family calls its
tensors and how it lays them out, `glm.py` brings the two together for ChatGLM-6B.
"""

from glm_multiuser.checkpoint.generation_defaults import read_generation_defaults
from glm_multiuser.checkpoint.glm import load_glm, write_huggingface
from glm_multiuser.checkpoint.huggingface import read_tensors

__all__ = ["load_glm", "read_generation_defaults", "read_tensors", "write_huggingface"]
