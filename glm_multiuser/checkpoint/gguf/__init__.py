"""GGUF files, the checkpoints of llama.cpp: weights, configuration and vocabulary in one file.

`file.py` reads metadata and finds the tensors, `blocks.py` dequantises them. `config.py` converts
the metadata to the model's configuration, through the layouts of transformers; `names.py` maps the
tensors to parameters. `tokenizers/gguf.py` reads the vocabulary.
"""
