"""Opening a model for a command, and the options that the commands share."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from glm_multiuser.cli.screen import notice
from glm_multiuser.errors import CheckpointError

if TYPE_CHECKING:
    from glm_multiuser.config import AnyModelConfig
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.sampling import SamplingParams

DEFAULT_CHECKPOINT = Path("ckpt/glm-tiny")
CHECKOUT = Path(__file__).resolve().parents[2]

Checkpoint = Annotated[
    Path,
    typer.Option(
        help="Folder in Hugging Face layout, or with MindFormers' .ckpt.",
        show_default=str(DEFAULT_CHECKPOINT),
    ),
]
Users = Annotated[int, typer.Option(min=1, help="Users that decode side by side.")]
SeqLength = Annotated[
    int, typer.Option(help="Tokens that each user can hold, prompt and answer together.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
DeviceTarget = Annotated[str, typer.Option(help="CPU or Ascend.")]
DeviceId = Annotated[int, typer.Option(help="Which card.")]
Kernels = Annotated[str, typer.Option(help="auto, native (our own, for the CPU) or portable.")]
WeightDtype = Annotated[
    Optional[str],
    typer.Option(
        help="Weights of native kernels: float32, bfloat16 or int8.", show_default="float32"
    ),
]


def find_checkpoint(folder: Path) -> Path:
    """The folder itself, or a relative one seen from the checkout instead of from here.

    Raises:
        CheckpointError: neither place has a `config.json`.
    """
    for candidate in (folder, CHECKOUT / folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise CheckpointError(
        f"no checkpoint at {folder}: a folder with config.json, weights and tokenizer files is "
        "needed; name another one with --checkpoint"
    )


def model_config(folder: Path) -> AnyModelConfig:
    """What a checkpoint's `config.json` says.

    Imported late: it brings numpy in, whose threads would take Ctrl-C before `keep_ctrl_c` has it.

    Raises:
        CheckpointError: no checkpoint, or none of a model that can be read.
    """
    from glm_multiuser.checkpoint import read_model_config

    return read_model_config(find_checkpoint(folder))


def llm_class() -> type[MultiUserLLM]:
    """Imported late: it brings MindSpore in, and `--help` must not wait for that."""
    from glm_multiuser.llm import MultiUserLLM

    return MultiUserLLM


def open_llm(
    checkpoint: Path,
    users: int,
    seq_length: int,
    device_target: str = "CPU",
    device_id: int = 0,
    **settings: Any,
) -> MultiUserLLM:
    """`MultiUserLLM.from_pretrained`, saying on stderr what takes so long.

    Raises:
        GLMMultiUserError: no such checkpoint, or a setting that cannot work.
    """
    folder = find_checkpoint(checkpoint)
    notice(f"loading {folder} and compiling its graphs for {users} users ...")
    return llm_class().from_pretrained(
        str(folder),
        users=users,
        seq_length=seq_length,
        device_target=device_target,
        device_id=device_id,
        **settings,
    )


def sampling_params(**settings: Any) -> SamplingParams:
    """`SamplingParams`, imported as late as the rest.

    Raises:
        InvalidParameterError: a value that is out of range.
    """
    from glm_multiuser.sampling import SamplingParams

    return SamplingParams(**settings)


def installed(distribution: str) -> str:
    """The version of an installed distribution, read without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
