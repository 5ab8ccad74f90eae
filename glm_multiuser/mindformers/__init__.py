"""MindFormers' own GLM with many users: its patches, and how they come into an installed one."""

from __future__ import annotations

from glm_multiuser.mindformers.run_time import enable

__all__ = ["enable"]
