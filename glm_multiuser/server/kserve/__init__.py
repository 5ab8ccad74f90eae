"""KServe v2 (the Open Inference Protocol) as NVIDIA Triton implements it, under `/v2`.

Models have text tensors as inputs and outputs (`signature.py`) and a single version, "1". Questions
are parsed without FastAPI (`fields.py`, `questions.py`), because the Python backend of a real
Triton server uses the same code.
"""
