"""`glm-multiuser serve`: one port for OpenAI, KServe v2, step and simple clients, and a page."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from glm_multiuser.cli import loading, screen, serve_triton
from glm_multiuser.errors import ConfigError

DEFAULT_PORT = 8000


def command(
    context: typer.Context,
    checkpoint: Annotated[
        Optional[list[str]],
        typer.Option(
            help="Folder, or NAME=FOLDER; may come several times. The first one answers requests "
            "that name no model.",
            show_default=str(loading.DEFAULT_CHECKPOINT),
        ),
    ] = None,
    available: Annotated[
        Optional[list[str]],
        typer.Option(help="Folder, or NAME=FOLDER, that is loaded only when a client asks for it."),
    ] = None,
    users: loading.Users = 8,
    seq_length: loading.SeqLength = 512,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for a slot.")] = 64,
    prefill_chunk: Annotated[
        Optional[int],
        typer.Option(
            help="Tokens of prompts that enter in a step beside the other users' next tokens.",
            show_default="what suits the device",
        ),
    ] = None,
    no_cache_prompt: Annotated[
        bool,
        typer.Option(
            "--no-cache-prompt",
            help="Compute every prompt whole, also what its user's slot still holds of it.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    api_keys: Annotated[
        Optional[Path],
        typer.Option(
            help="File with a name and a key per line; also the environment variable "
            "GLM_MULTIUSER_API_KEYS. Without keys everybody who reaches the port may ask."
        ),
    ] = None,
    cors_origin: Annotated[
        Optional[list[str]], typer.Option(help="Another origin whose pages may ask.")
    ] = None,
    warm_up: Annotated[
        Optional[Path],
        typer.Option(help="File with a prompt per line that every model answers before ready."),
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get at the end.")
    ] = 30.0,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds after which a request ends with an error.")
    ] = 600.0,
    requests_per_user: Annotated[
        int, typer.Option(min=1, help="Requests of one session at the same time.")
    ] = 4,
    requests_per_key: Annotated[
        int, typer.Option(min=1, help="Requests of one API key at the same time.")
    ] = 256,
    step_expiry: Annotated[
        float,
        typer.Option(help="Seconds after which a generation of the step API is given up."),
    ] = 60.0,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 1 << 20,
    memory_budget: Annotated[
        Optional[float],
        typer.Option(help="GiB that weights and caches of all models may take together."),
    ] = None,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Prompts and answers may stand in the log.")
    ] = False,
    device_target: loading.DeviceTarget = "CPU",
    device_id: loading.DeviceId = 0,
    kernels: loading.Kernels = "auto",
    weight_dtype: loading.WeightDtype = None,
    replicas: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            help="Servers, each on a device of its own, behind one door; needs Ray Serve.",
            show_default="one server, without Ray",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="fastapi: our own server. triton: NVIDIA Triton with our model repository; gRPC "
            "and metrics are on the two ports behind --port."
        ),
    ] = "fastapi",
) -> None:
    """Serve OpenAI, KServe v2 (Triton), step and simple clients, and a web page, on one port.

    The log goes to stderr. SIGTERM or Ctrl-C lets running requests end first; a second Ctrl-C does
    not.
    """
    if backend == "triton":
        serve_triton.run(context)
        return
    if backend != "fastapi":
        raise ConfigError(f"--backend is {backend!r}; it must be 'fastapi' or 'triton'")
    try:
        from glm_multiuser.server.keys import read_keys
        from glm_multiuser.server.logs import configure_logging
        from glm_multiuser.server.run import listen, serve, url_of
        from glm_multiuser.server.settings import (
            Limits,
            ModelSettings,
            ServerSettings,
            parse_place,
        )
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}; install it with pip install 'glm-multiuser[server]'"
        ) from error

    def models(places: list[str], load: bool) -> list[ModelSettings]:
        named = [parse_place(place) for place in places]
        return [
            ModelSettings(
                name,
                loading.find_checkpoint(folder),
                users,
                seq_length,
                max_queue,
                prefill_chunk,
                not no_cache_prompt,
                load,
            )
            for name, folder in named
        ]

    settings = ServerSettings(
        models=(
            *models(checkpoint or [str(loading.DEFAULT_CHECKPOINT)], load=True),
            *models(available or [], load=False),
        ),
        limits=Limits(
            body_bytes=max_body,
            request_seconds=request_timeout,
            requests_per_user=requests_per_user,
            requests_per_key=requests_per_key,
            step_seconds=step_expiry,
        ),
        keys=read_keys(api_keys),
        drain_seconds=drain,
        memory_bytes=None if memory_budget is None else int(memory_budget * 2**30),
        cors_origins=tuple(cors_origin or ()),
        log_prompts=log_prompts,
        device_target=device_target,
        device_id=device_id,
        kernels=kernels,
        weight_dtype=weight_dtype,
        **({} if warm_up is None else {"warm_up": read_prompts(warm_up)}),
    )
    if replicas is not None:
        if device_id:
            raise ConfigError(
                f"--device-id is {device_id}; with --replicas, Ray gives each one a device"
            )
        from glm_multiuser.deploy.ray_local import need_ray, serve_replicas

        need_ray()
    listening = listen(host, port)
    screen.notice(f"listening on {url_of(listening)}; the page is there, too")
    configure_logging(as_json=not sys.stderr.isatty())
    logging.captureWarnings(True)
    if replicas is not None:
        serve_replicas(settings, replicas, listening)
        return
    asyncio.run(serve(settings, listening))


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not empty.

    Raises:
        ConfigError: no such file, or not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the warm-up prompts in {path}: {error}") from error
    return tuple(line for line in lines if line.strip())
