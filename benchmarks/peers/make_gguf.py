"""Writes a GGUF model with random weights for llama.cpp, in the shape shared by all variants.

    python make_gguf.py SHAPE_AS_JSON f32|bf16|q8_0|q4_0|q4_1 FILE

The architecture is GPT-2's, the one in llama.cpp with the matrices of ChatGLM-6B: four of hidden x
hidden for attention and two of hidden x inner for the MLP, with biases and layer norms. A small
difference: positions are added, not rotated. Needs the `gguf` package from llama.cpp's sources.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import gguf
import numpy as np

POSITIONS = 4096
FILE_TYPES = {"f32": 0, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3}
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}


def sizes(shape: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Name -> size of every tensor."""
    hidden, inner = shape["hidden_size"], shape["inner_hidden_size"]
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape["vocab_size"], hidden),
        "position_embd.weight": (POSITIONS, hidden),
        "output_norm.weight": (hidden,),
        "output_norm.bias": (hidden,),
        "output.weight": (shape["vocab_size"], hidden),
    }
    matrices = {
        "attn_qkv": (3 * hidden, hidden),
        "attn_output": (hidden, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for layer in range(shape["num_layers"]):
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{layer}.{name}.weight"] = (hidden,)
            found[f"blk.{layer}.{name}.bias"] = (hidden,)
        for name, size in matrices.items():
            found[f"blk.{layer}.{name}.weight"] = size
            found[f"blk.{layer}.{name}.bias"] = size[:1]
    return found


def write(shape: Mapping[str, int], kind: str, path: str) -> None:
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_layers"])
    writer.add_feed_forward_length(shape["inner_hidden_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(FILE_TYPES[kind])
    # llama.cpp requires a vocabulary; its tokens are not used.
    vocab = shape["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}".encode() for number in range(vocab)])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    for name, size in sizes(shape).items():
        if name.endswith("norm.weight"):
            array = np.ones(size, np.float32)
        else:
            array = random.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        # Vectors and positions are float32 in every type, as in llama.cpp's own converter.
        if len(size) == 2 and kind != "f32" and not name.startswith("position"):
            array = gguf.quantize(array, TYPES[kind])
            writer.add_tensor(name, array, raw_dtype=TYPES[kind])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3])
