"""A pytest plugin (`-p`): makes the package use the library named in `calling.py`."""

from glm_multiuser.backends.native import library
from tests.kernels.calling import PATH

library.PATH = PATH
