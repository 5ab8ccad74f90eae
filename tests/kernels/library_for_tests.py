"""A plugin of pytest (`-p`): the package uses the library that `calling.py` names, not its own."""

from glm_multiuser.backends.native import library
from tests.kernels.calling import PATH

library.PATH = PATH
