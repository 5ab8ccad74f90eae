"""The command `glm-multiuser`; one module of this package per subcommand.

The modules of the commands do not postpone their annotations: typer evaluates them, and on Python
3.9 finds only what stands there.
"""

import platform
import sys
from typing import Annotated, Any, Optional

import typer
import typer.core

from glm_multiuser.cli import bench, chat, convert, demo, generate, patch, plan, selfcheck, serve
from glm_multiuser.cli.interrupts import keep_ctrl_c
from glm_multiuser.cli.loading import installed
from glm_multiuser.cli.screen import print_error
from glm_multiuser.errors import GLMMultiUserError


class _Commands(typer.core.TyperGroup):
    """The subcommands, with the library's own errors as one red line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GLMMultiUserError as error:
            print_error(error)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    name="glm-multiuser",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version_text() -> str:
    """This library's version, and the versions that a bug report needs beside it."""
    own, mindspore = installed("glm_multiuser"), installed("mindspore")
    return f"glm-multiuser {own} (mindspore {mindspore}, python {platform.python_version()})"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        Optional[bool],
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions and end."
        ),
    ] = None,
) -> None:
    """Many users on one GLM: one copy of the weights, one set of compiled graphs, one
    key/value cache per user.

    Start with `glm-multiuser demo`: eight users ask at once, each in a pane of their
    own, and every answer is compared with the one given alone.
    """


app.command("demo")(demo.command)
app.command("chat")(chat.command)
app.command("generate")(generate.command)
app.command("serve")(serve.command)
app.command("bench")(bench.command)
app.command("plan")(plan.command)
app.command("selfcheck")(selfcheck.command)
app.command("patch")(patch.command)
app.command("convert")(convert.command)


def main() -> None:
    """Entry point of the command `glm-multiuser`."""
    keep_ctrl_c()
    # A pipe that was closed (`glm-multiuser generate | head`) ends the command quietly.
    try:
        app()
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
