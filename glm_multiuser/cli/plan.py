"""`glm-multiuser plan`: how many users fit, and a lower bound for a decode step's time."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from glm_multiuser.cli import loading, plan_plot, plan_tables, screen
from glm_multiuser.cli.options import one_of, takes_options
from glm_multiuser.cli.published import PUBLISHED, published_dtype
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.sizes import bytes_of

if TYPE_CHECKING:
    from glm_multiuser.cli.roofline import DecodeStep, Device

SHORTEST_SWEPT = 128
WITHOUT = ("users", "users_per_cell", "device_target", "device_id")
"""Settings that a plan computes, or that its device determines."""


def complete_device(incomplete: str) -> list[str]:
    """Returns the known devices, for shell completion."""
    from glm_multiuser.cli.roofline import DEVICES

    return one_of(DEVICES)(incomplete)


@takes_options(EngineConfig, without=WITHOUT, seq_length=2048)
def command(
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint folder, GGUF file, Hugging Face model (owner/name), or one of "
            f"{', '.join(PUBLISHED)}.",
            autocompletion=one_of(PUBLISHED),
        ),
    ] = "chatglm3-6b",
    device: Annotated[
        str,
        typer.Option(
            help="910A, 910B (published peaks, not measured) or CPU (this one).",
            autocompletion=complete_device,
        ),
    ] = "910A",
    device_memory: Annotated[
        Optional[str], typer.Option(help='Device memory, e.g. "32GiB".')
    ] = None,
    bandwidth: Annotated[
        Optional[str], typer.Option(help='Memory bandwidth per second, e.g. "1.2TB".')
    ] = None,
    compute: Annotated[Optional[float], typer.Option(help="TFLOPS in the compute type.")] = None,
    context: Annotated[
        Optional[int],
        typer.Option(help="Tokens per user in a step.", show_default="seq-length"),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also plot users against sequence length.")
    ] = False,
    plot: Annotated[Path, typer.Option(help="Plot file of --sweep.")] = Path("plan.png"),
    json_file: Annotated[
        Optional[Path], typer.Option("--json", help="Also write the plan here, as one line.")
    ] = None,
    **settings: Any,
) -> None:
    """Plan how many users fit: weights, caches and workspace, computed from the model's shape.

    Also the roofline of a decode step: the time a device needs to read the weights and all caches,
    or to do the arithmetic. It is a lower bound; nothing was measured on an Ascend card.
    """
    if sweep:
        screen.check_picture(plot)
    screen.check_writable(json_file)
    config = model_shape(model)
    chosen = choose_device(device, device_memory, bandwidth, compute)
    engine = EngineConfig(users=1, device_target=chosen.target, **settings)
    engine.check_fits(config)
    engine = with_weight_dtype(engine, model, config)
    seq_length = engine.seq_length
    context = seq_length if context is None else context
    if not 1 <= context <= seq_length:
        raise ConfigError(f"context is {context}; it must be between 1 and seq-length {seq_length}")
    plan = make_plan(config, engine, chosen)
    console = screen.output()
    console.print(plan_tables.memory_table(f"{model}, {device}", plan))
    if plan["graphs"]:
        console.print(plan_tables.start_up(plan), soft_wrap=True)
    if not plan["fits"]:
        console.print(plan_tables.does_not_fit(model, device, plan), soft_wrap=True)
    steps = roofline(config, engine, chosen, plan["users"], context)
    if steps:
        screen.print_numbers(console, plan_tables.roofline_table(steps, context))
    found = {"model": model, "device": {"name": device, **asdict(chosen)}, **plan}
    found["decode_steps"] = [
        {**asdict(step), "tokens_per_second": step.tokens_per_second} for step in steps
    ]
    if sweep:
        found["sweep"] = sweep_lengths(config, engine, chosen)
        screen.print_numbers(console, plan_tables.sweep_table(found["sweep"]))
        plan_plot.plot_sweep(
            found["sweep"], plan_tables.heading(model, device, plan), seq_length, plot
        )
        screen.notice(f"plot written to {plot}")
    if json_file is not None:
        json_file.write_text(json.dumps(found) + "\n", encoding="utf-8")


def model_shape(model: str) -> AnyModelConfig:
    """Reads the shape of a published model, a checkpoint folder, or a model on a hub.

    Raises:
        ConfigError: none of them.
        CheckpointError: a folder with an unreadable `config.json`, or a hub without the model.
    """
    if model in PUBLISHED:
        return PUBLISHED[model]
    try:
        folder = loading.find_checkpoint(Path(model), weights=False)
    except CheckpointError:
        from glm_multiuser.checkpoint.hub import is_name

        if is_name(model):
            raise
        known = ", ".join(PUBLISHED)
        raise ConfigError(
            f"model is {model!r}; it must be a folder with config.json, a GGUF file, or one of "
            f"{known}"
        ) from None
    return loading.model_config(folder)


def with_weight_dtype(engine: EngineConfig, model: str, config: AnyModelConfig) -> EngineConfig:
    """Returns `engine` with the matrices' type; raises as `model_shape`."""
    from glm_multiuser import backend_choice
    from glm_multiuser.checkpoint import stored_as

    if model in PUBLISHED:
        return backend_choice.with_weight_dtype(engine, config, published_dtype(model))
    folder = loading.find_checkpoint(Path(model), weights=False)
    stored = stored_as(folder, config)
    return backend_choice.with_weight_dtype(engine, config, *stored)


def choose_device(
    name: str, device_memory: Optional[str], bandwidth: Optional[str], compute: Optional[float]
) -> "Device":
    """Returns a known device, with given values in place of published ones.

    Raises:
        ConfigError: an unknown device, an invalid value, or only one of bandwidth and compute if
            the other is unknown.
    """
    from glm_multiuser.cli.conditions import memory_gb
    from glm_multiuser.cli.roofline import DEVICES

    if name not in DEVICES:
        raise ConfigError(f"device is {name!r}; it must be one of {', '.join(DEVICES)}")
    known = DEVICES[name]
    if device_memory is not None:
        known = replace(known, memory=bytes_of("device-memory", device_memory))
    if known.memory is None:
        here = memory_gb()
        if here is None:
            raise ConfigError("device-memory is not given, and this system does not tell its own")
        known = replace(known, memory=int(here * 2**30))
    if bandwidth is not None:
        known = replace(known, bandwidth=float(bytes_of("bandwidth", bandwidth)))
    if compute is not None:
        if not 0 < compute <= 1e9:
            raise ConfigError(f"compute is {compute}; it must be above 0 and at most 1e9 TFLOPS")
        known = replace(known, compute=compute * 1e12)
    if (known.bandwidth is None) != (known.compute is None):
        missing = "bandwidth" if known.bandwidth is None else "compute"
        raise ConfigError(f"{missing} is not given; a roofline needs bandwidth and compute")
    return known


def make_plan(config: AnyModelConfig, engine: EngineConfig, device: "Device") -> dict[str, Any]:
    """Computes the numbers of the first table, in bytes.

    Raises:
        ConfigError: native kernels, or a weight type that needs them, where they are unavailable.
    """
    from glm_multiuser import backend_choice, memory
    from glm_multiuser.engine.graph_shapes import graph_counts

    backend_choice.check_kernels(engine)
    memory.check_cache_memory(config, engine)
    available, per_user = device.memory or 0, memory.user_bytes(config, engine)
    slots, caches = slots_and_caches(config, engine, device)
    users, rest = divmod(caches, per_user)
    full, most = (replace(engine, users=max(count, 1)) for count in (users, slots))
    native = backend_choice.is_native(engine)
    dtype, cache_dtype = backend_choice.dtype_of(engine), backend_choice.cache_dtype_of(engine)
    return {
        "seq_length": engine.seq_length,
        "dtype": dtype,
        "target": engine.device_target,
        "kernels": "native" if native else "portable",
        "weight_dtype": backend_choice.weight_dtype_of(engine),
        "weight_count": memory.weight_count(config),
        "weight_bytes": memory.weight_bytes(config, engine),
        "cache_dtype": cache_dtype,
        "bytes_per_token": memory.cache_bytes_per_user(config, 1, cache_dtype),
        "bytes_per_user": per_user,
        "cache_memory": engine.cache_limit,
        "cache_bytes": caches,
        "zeros_bytes": memory.zeros_bytes(config, engine),
        "workspace_bytes": memory.workspace_bytes(config, full),
        "device_bytes": available,
        "fits": slots > 0,
        "users": users,
        "tokens": users * engine.seq_length + memory.tokens_in(config, engine, rest),
        "total_bytes": memory.total_bytes(config, most) + memory.workspace_bytes(config, full),
        "loading_bytes": memory.loading_bytes(config, engine),
        "graphs": {} if native else graph_counts(config, full),
    }


def slots_and_caches(
    config: AnyModelConfig, engine: EngineConfig, device: "Device"
) -> tuple[int, int]:
    """Returns how many slots fit on the device, and the most bytes that their caches may take."""
    from glm_multiuser import memory

    slots = memory.users_that_fit(config, engine, device.memory or 0)
    # `replace` rejects an engine without users.
    caches = memory.cache_bytes(config, replace(engine, users=slots)) if slots else 0
    return slots, caches


def roofline(
    config: AnyModelConfig, engine: EngineConfig, device: "Device", most: int, context: int
) -> "list[DecodeStep]":
    """Computes steps of 1, 2, 4 ... users; none if bandwidth or compute is unknown."""
    from glm_multiuser.cli.roofline import decode_step, user_counts

    if device.bandwidth is None or device.compute is None:
        return []
    return [
        decode_step(config, engine, users, context, device.bandwidth, device.compute)
        for users in user_counts(most)
    ]


def sweep_lengths(
    config: AnyModelConfig, engine: EngineConfig, device: "Device"
) -> list[dict[str, Any]]:
    """Computes users that fit, and the bound of tokens per second, for every sequence length."""
    from glm_multiuser import memory

    longest = config.max_sequence_length
    powers = {1 << power for power in range(int(math.log2(longest)) + 1)}
    found = []
    for length in sorted({*powers, longest, engine.seq_length}):
        if length < min(SHORTEST_SWEPT, longest):
            continue
        one = replace(engine, seq_length=length)
        users = slots_and_caches(config, one, device)[1] // memory.user_bytes(config, one)
        steps = roofline(config, one, device, users, length)
        found.append(
            {
                "seq_length": length,
                "users": users,
                "tokens_per_second": steps[-1].tokens_per_second if steps else None,
            }
        )
    return found
