"""`glm-multiuser chat`: several conversations in one terminal."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from glm_multiuser.cli import loading, screen
from glm_multiuser.cli.interrupts import raised
from glm_multiuser.cli.options import Checkpoint, JsonSchema, Sampling, takes_options
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import GLMMultiUserError, PromptTooLongError
from glm_multiuser.settings import pick

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.sampling_params import SamplingParams

History = list[tuple[str, str]]

HELP = """\
/user NAME   switch to user NAME; each user has a separate conversation
/users       list users
/reset       clear this user's conversation
/help        show this help
/quit        exit (or Ctrl-D)
Ctrl-C       while an answer is streaming: cancel that answer only"""


@takes_options(EngineConfig, users=4)
@takes_options(Sampling, max_tokens=256)
def command(
    json_schema: JsonSchema = None,
    checkpoint: Checkpoint = loading.DEFAULT_CHECKPOINT,
    **settings: Any,
) -> None:
    """Chat as several users, each with a separate history.

    Reads lines from a terminal or a pipe; /help lists the commands. A question that fails does not
    end the chat; with a pipe, the exit code is then 1.
    """
    grammar = loading.json_grammar(json_schema)
    params = loading.sampling_params(**pick(Sampling, settings), grammar=grammar)
    # On a terminal Ctrl-C cancels an answer, elsewhere it ends the command.
    interrupts = raised() if sys.stdin.isatty() else nullcontext()
    with loading.open_llm(checkpoint, chat=True, **settings) as llm, interrupts:
        loading.check_grammar(llm, grammar)
        conversations = Conversations(llm, params, screen.output())
        conversations.run()
    # At a terminal everybody has seen the error; a script looks at the exit code.
    if conversations.failed and not sys.stdin.isatty():
        raise typer.Exit(1)


class Conversations:
    """The current user, and all users' histories.

    Attributes:
        failed: whether a question got an error instead of an answer.
    """

    def __init__(self, llm: "MultiUserLLM", params: "SamplingParams", console: Console) -> None:
        self.llm = llm
        self.params = params
        self.console = console
        self.user = "alice"
        self.failed = False
        self.histories: dict[str, History] = {self.user: []}

    def run(self) -> None:
        """Handles lines until /quit or the end of the input."""
        if sys.stdin.isatty():
            self.say("Ask something, or /help. You are alice.")
        for line in self.lines():
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.ask(line)

    def lines(self) -> Iterator[str]:
        """Yields input lines, stripped; Ctrl-C at the prompt only clears the line."""
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  (gives input() its history and editing)
        while True:
            try:
                try:
                    if interactive:
                        line = input(f"{self.user}> ")
                    else:
                        line = sys.stdin.readline()
                        if not line:
                            return
                except EOFError:
                    self.console.print()
                    return
            except KeyboardInterrupt as interrupt:
                self.console.print()
                # Python may raise a Ctrl-C only after the Ctrl-D that followed it.
                if isinstance(interrupt.__context__, EOFError):
                    return
                self.say("/quit or Ctrl-D ends the chat")
                continue
            yield line.strip()

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/user" and argument:
            self.user = argument
            history = self.histories.setdefault(argument, [])
            self.say(f"you are {argument} ({turns(history)} so far)")
        elif name == "/users":
            for user, history in self.histories.items():
                mark = "*" if user == self.user else " "
                self.say(f"{mark} {user}: {turns(history)}")
        elif name == "/reset":
            self.histories[self.user] = []
            self.say(f"{self.user}'s conversation is forgotten")
        else:
            if name != "/help":
                self.say(f"unknown command {line!r}")
            self.say(HELP)

    def ask(self, question: str) -> None:
        """Streams one answer; only complete answers are added to the history."""
        history = self.histories[self.user]
        answer = ""
        stream = None
        try:
            stream = self.llm.stream_chat(
                question, history=list(history), user=self.user, params=self.params
            )
            for piece in stream:
                answer += piece.text
                self.console.print(Text(screen.printable(piece.text)), end="", soft_wrap=True)
                self.console.file.flush()
        except KeyboardInterrupt:
            self.console.print()
            self.say("(cancelled; not part of the conversation)")
            return
        except GLMMultiUserError as error:
            self.failed = True
            self.console.print()
            screen.print_error(error)
            if isinstance(error, PromptTooLongError) and history:
                self.say("/reset makes room again")
            return
        finally:
            # Closing the stream cancels the request when it has not ended by itself.
            if stream is not None:
                stream.close()
        self.console.print()
        history.append((question, answer))

    def say(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)


def turns(history: History) -> str:
    return "1 turn" if len(history) == 1 else f"{len(history)} turns"
