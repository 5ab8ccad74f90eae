"""`glm-multiuser convert`: between Hugging Face layout and MindFormers' `.ckpt`.

Also converts pytorch_model*.bin and GGUF files to safetensors.
"""

from pathlib import Path
from textwrap import indent
from typing import Annotated, Optional

import typer
from rich.filesize import decimal

from glm_multiuser.cli import screen
from glm_multiuser.cli.interrupts import raised


def command(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder with `*.safetensors`, `pytorch_model*.bin` or `*.ckpt`; a .ckpt or GGUF "
            "file."
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="Output folder.")],
    to: Annotated[
        Optional[str],
        typer.Option(help="mindformers or huggingface.", show_default="the other format"),
    ] = None,
    dtype: Annotated[
        Optional[str],
        typer.Option(help="float16 or float32.", show_default="as in the source"),
    ] = None,
    config: Annotated[
        Optional[Path],
        typer.Option(help="The model's config.json.", show_default="next to the weights"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Convert a checkpoint to MindFormers' .ckpt, or a .ckpt to Hugging Face layout.

    pytorch_model*.bin (with --to huggingface) and GGUF files become model.safetensors, quantised
    weights in float32 unless --dtype is given. The new folder is complete: weights, config.json and
    the tokenizer's files. glm-multiuser loads both formats. Caches and optimizer state in a .ckpt
    are dropped.
    """
    # Imported late, because `--help` must not wait for it.
    from glm_multiuser.checkpoint.convert import MINDFORMERS, convert, direction
    from glm_multiuser.progress import show_progress

    to = direction(source, to)
    screen.notice(f"converting {source} to {to} ...")
    with raised(), show_progress(None) as report:
        convert(source, destination, to, dtype, config, force, report)
    print_folder(destination)
    if to == MINDFORMERS:
        typer.echo("\nMindFormers loads it with")
        typer.echo(indent(how_to_load(destination), "    "))


def print_folder(folder: Path) -> None:
    """Prints the files of the checkpoint with their sizes."""
    from glm_multiuser.tokenizers.chat_template import MORE_TEMPLATES

    typer.echo(f"{folder}/")
    found = [*folder.iterdir(), *folder.glob(MORE_TEMPLATES)]  # not all there is below
    for path in sorted(filter(Path.is_file, found)):
        typer.echo(f"  {path.relative_to(folder)!s:26}{decimal(path.stat().st_size):>10}")


def how_to_load(folder: Path) -> str:
    """Returns a program that loads the folder with MindFormers."""
    from glm_multiuser.checkpoint import read_model_config
    from glm_multiuser.checkpoint.convert import MINDFORMERS_CONFIG
    from glm_multiuser.checkpoint.loading import CKPT
    from glm_multiuser.checkpoint.mindformers_arguments import MODEL_CLASSES

    config, model = MODEL_CLASSES[read_model_config(folder).family]
    arguments, weights = str(folder / MINDFORMERS_CONFIG), str(folder / CKPT)
    return f"""
import json
from mindformers import {model}, {config}

with open({arguments!r}) as file:
    config = {config}(**json.load(file))
config.checkpoint_name_or_path = {weights!r}
model = {model}(config)"""
