"""GGUF files, the checkpoints of llama.cpp: weights, configuration and vocabulary in one file.

`file.py` reads metadata and finds the tensors, `blocks.py` dequantises them. `config.py` makes the
model's configuration of the metadata, by way of the layouts of transformers; `names.py` says where
the tensors go. The vocabulary is read by `tokenizers/gguf.py`.
"""
