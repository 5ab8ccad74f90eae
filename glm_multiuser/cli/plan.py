"""`glm-multiuser plan`: how many users fit."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from glm_multiuser.cli import loading, screen
from glm_multiuser.config import AnyModelConfig, EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.published import PUBLISHED

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def command(
    model: Annotated[
        str, typer.Option(help=f"A checkpoint folder, or one of {', '.join(PUBLISHED)}.")
    ] = "chatglm3-6b",
    device_memory: Annotated[str, typer.Option(help="Memory of the device.")] = "32GiB",
    seq_length: loading.SeqLength = 2048,
    dtype: Annotated[str, typer.Option(help="float16 or float32.")] = "float16",
) -> None:
    """How many users fit: weights, bytes per token and per user, computed from the model's shape.

    Graphs, activations and MindSpore itself come on top; nothing was measured on an Ascend card.
    """
    config = PUBLISHED.get(model) or loading.model_config(Path(model))
    EngineConfig(seq_length=seq_length, dtype=dtype).check_fits(config)
    screen.output().print(report(model, config, seq_length, dtype, bytes_of(device_memory)))


def bytes_of(text: str) -> int:
    """A size such as "32GiB", "900 MB" or "1024".

    Raises:
        ConfigError: no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ConfigError(
            f"device-memory is {text!r}; it must be a number with one of {', '.join(UNITS)[2:]}"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def users_that_fit(config: AnyModelConfig, seq_length: int, dtype: str, available: int) -> int:
    """As many as have room beside the weights and the zeros that overwrite used memory."""
    from glm_multiuser import memory

    alone = memory.total_bytes(config, EngineConfig(users=1, seq_length=seq_length), dtype)
    per_user = memory.cache_bytes_per_user(config, seq_length, dtype)
    return max(0, (available - alone) // per_user + 1)


def report(name: str, config: AnyModelConfig, seq_length: int, dtype: str, available: int) -> Table:
    """The plan as a table of two columns."""
    from glm_multiuser import memory

    weights = memory.weight_count(config)
    rows = {
        "weights": f"{weights / 1e9:.2f} billion, {size(weights * memory.BYTES[dtype])}",
        "keys and values per token": size(memory.cache_bytes_per_user(config, 1, dtype)),
        f"per user of {seq_length} tokens": size(
            memory.cache_bytes_per_user(config, seq_length, dtype)
        ),
        f"users in {size(available)}": str(users_that_fit(config, seq_length, dtype, available)),
    }
    table = Table("", f"{name}, {dtype}", title="weights and caches alone")
    for row in rows.items():
        table.add_row(*row)
    return table


def size(count: int) -> str:
    """In the largest unit of which there is at least one."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit.upper()]:
            return f"{count / UNITS[unit.upper()]:.4g} {unit}"
    return f"{count} B"
