"""KServe v2 (the Open Inference Protocol) as NVIDIA Triton implements it, under `/v2`.

A model is served with text tensors in and out, see `signature.py`; its one version is "1". The
fields of a question (`fields.py`, `questions.py`) are read without FastAPI: the Python backend of a
real Triton server reads them with the same code.
"""
