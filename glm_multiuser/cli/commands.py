"""All subcommands, and the format of their errors.

Modules of commands do not postpone annotations: typer evaluates them, which fails on Python 3.9.
"""

import io
import os
import platform
import sys
from typing import Annotated, Any, Optional

import typer
import typer.core

from glm_multiuser.cli import bench, chat, convert, demo, generate, patch, plan, selfcheck, serve
from glm_multiuser.cli.interrupts import end
from glm_multiuser.cli.screen import print_error
from glm_multiuser.errors import EngineClosedError, GenerationError, GLMMultiUserError
from glm_multiuser.version import installed_version, own_version

RUN_TIME_ERRORS = (EngineClosedError, GenerationError)
"""All others reject a command beforehand."""


class _Commands(typer.core.TyperGroup):
    """The subcommands; prints the library's errors as one red line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GLMMultiUserError as error:
            print_error(error)
            raise typer.Exit(1 if isinstance(error, RUN_TIME_ERRORS) else 2) from None
        except KeyboardInterrupt:
            end()


app = typer.Typer(
    cls=_Commands,
    name="glm-multiuser",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version_text() -> str:
    """Returns the versions that a bug report needs, including this library's."""
    own, mindspore = own_version(), installed_version("mindspore")
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
            "--version", callback=_print_version, is_eager=True, help="Print versions and exit."
        ),
    ] = None,
) -> None:
    """Serve many users with one language model: one copy of the weights, one set of compiled
    graphs, one KV cache per user, continuous batching.

    Start with `glm-multiuser demo`: eight concurrent users, each in a separate pane, and every
    answer is compared with the same request running alone.
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


def run() -> None:
    """Runs the command; file errors are printed as one line."""
    open_streams()
    for stream in (sys.stdin, sys.stdout):
        # Not every terminal and pipe can display all answers, or sends UTF-8.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # A closed pipe (`glm-multiuser generate | head`) ends the command without an error.
        give_up()
    except (OSError, UnicodeError) as error:
        print_error(error)
        give_up()


def open_streams() -> None:
    """Replaces closed standard streams (`<&-`), which are None, by the null device."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def give_up() -> None:
    """Ends the process with exit code 1, without flushing stdout again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(1)
