"""The command `glm-multiuser`; one module of this package per subcommand.

`interrupts.py` comes first: it handles Ctrl-C before the imports of the commands, in `commands.py`,
begin.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the command `glm-multiuser`."""
    from glm_multiuser.cli.interrupts import keep_ctrl_c

    keep_ctrl_c()
    from glm_multiuser.cli.commands import run

    run()
