"""Where Triton finds the model; what it does is in `glm_multiuser.deploy.triton_model`."""

import sys

# The interpreter inside Triton writes ASCII, and printing anything else would fail the load.
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding="utf-8", errors="replace")

from glm_multiuser.deploy.triton_model import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
