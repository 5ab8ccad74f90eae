"""Options that commands share, mostly derived from settings."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Callable, Optional, get_origin

import typer

from glm_multiuser.cli.loading import DEFAULT_CHECKPOINT
from glm_multiuser.errors import ConfigError
from glm_multiuser.settings import Function, Setting, add_parameters, setting, settings_of

Checkpoint = Annotated[
    Path,
    typer.Option(
        help="Folder in Hugging Face layout or with a MindFormers .ckpt, GGUF file, or model to "
        "download: owner/name (Hugging Face) or modelscope:owner/name (ModelScope).",
        show_default=str(DEFAULT_CHECKPOINT),
    ),
]

JsonSchema = Annotated[
    Optional[Path],
    typer.Option(help="JSON schema file; every answer is JSON that matches it."),
]


@dataclass(frozen=True)
class Sampling:
    """The fields of `SamplingParams` that commands accept, which validates them."""

    max_tokens: int = setting(128, "Maximum tokens per answer")
    temperature: float = setting(0.0, "0: greedy decoding")
    top_k: int = setting(0, "Sample from the top_k most likely tokens; 0: off")
    top_p: float = setting(1.0, "Cumulative probability of the tokens to sample from; 1: off")
    seed: Optional[int] = setting(None, "Random seed; the same seed gives the same answer")


def one_of(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns shell completion for an option with known values."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def takes_options(
    declared: type, *, without: Sequence[str] = (), **defaults: Any
) -> Callable[[Function], Function]:
    """Adds an option for each setting of a dataclass to a command with `**settings`.

    Settings that are parameters of the command itself are skipped.

    Args:
        declared: the dataclass.
        without: settings to skip.
        defaults: defaults that override those of the dataclass.
    """

    def add(command: Function) -> Function:
        skipped = {*without, *signature(command).parameters}
        settings = [one for one in settings_of(declared) if one.name not in skipped]
        added = [
            _parameter(one, defaults.get(one.name, one.default), panel=declared.__name__)
            for one in settings
        ]
        add_parameters(command, added)
        return command

    return add


@contextmanager
def named_by_option(*declared: type) -> Iterator[None]:
    """In errors of settings, replaces the field's name by its option, where they differ.

    Raises:
        ConfigError: a setting out of its limits.
    """
    settings = [one for each in declared for one in settings_of(each)]
    try:
        yield
    except ConfigError as error:
        name, _, text = str(error).partition(" ")
        option = next((one.option for one in settings if one.name == name), "")
        raise ConfigError(f"{option or name} {text}") from None


def _parameter(one: Setting, default: Any, panel: str) -> Parameter:
    kind: Any = one.type
    if get_origin(kind) is tuple:
        kind, default = list[one.kind], list(default)  # type: ignore[name-defined]
    names = [one.option] if one.option else []
    complete = one_of(one.choices) if one.choices else None
    option = typer.Option(*names, help=one.text, rich_help_panel=panel, autocompletion=complete)
    annotation = Annotated[kind, option]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
