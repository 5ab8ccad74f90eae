"""`python -m glm_multiuser.cli` is the command `glm-multiuser`."""

from glm_multiuser.cli import main

main()
