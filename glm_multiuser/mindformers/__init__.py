"""Patches that make MindFormers' own GLM multi-user, and the code that applies them."""

from __future__ import annotations

from glm_multiuser.mindformers.run_time import enable

__all__ = ["enable"]
