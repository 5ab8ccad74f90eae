"""KServe v2 (the Open Inference Protocol) as NVIDIA Triton speaks it, under `/v2`.

A model is served with text tensors in and out, see `signature.py`; its one version is "1". What a
question consists of (`fields.py`, `asks.py`) is read without FastAPI: the models that a real Triton
serves read theirs with it, too.
"""
