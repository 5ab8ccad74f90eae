"""KServe v2 (the Open Inference Protocol) as NVIDIA Triton speaks it, under `/v2`.

A model is served with text tensors in and out, see `signature.py`; its one version is "1".
"""

from __future__ import annotations

from glm_multiuser.server.kserve.routes import router

__all__ = ["router"]
