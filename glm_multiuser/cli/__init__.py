"""The command `glm-multiuser`; one module of this package per subcommand.

`interrupts.py` comes first: it handles Ctrl-C before the imports of the commands, in `commands.py`,
begin.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from glm_multiuser.cli.commands import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the command `glm-multiuser`."""
    from glm_multiuser.cli.interrupts import keep_ctrl_c

    keep_ctrl_c()
    from glm_multiuser.cli.commands import run

    run()


def __getattr__(name: str) -> object:
    if name == "app":
        from glm_multiuser.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
