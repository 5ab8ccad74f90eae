"""`glm-multiuser serve`: one port for every protocol, and a web page."""

import asyncio
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from glm_multiuser.cli import loading, screen, serve_triton
from glm_multiuser.cli.options import named_by_option, takes_options
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.settings import Limits, ServerSettings, model_settings
from glm_multiuser.settings import pick

DEFAULT_PORT = 8000


@takes_options(ServerSettings)
@takes_options(Limits)
@takes_options(EngineConfig)
def command(
    context: typer.Context,
    checkpoint: Annotated[
        Optional[list[str]],
        typer.Option(
            help="Folder, GGUF file or Hugging Face model (owner/name), or NAME= and one of these; "
            "can be repeated. The first one is the default for requests without a model.",
            show_default=str(loading.DEFAULT_CHECKPOINT),
        ),
    ] = None,
    available: Annotated[
        Optional[list[str]],
        typer.Option(help="Like --checkpoint, but loaded only through the API."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = DEFAULT_PORT,
    api_keys: Annotated[
        Optional[Path],
        typer.Option(
            help="File with one `NAME KEY [admin]` per line; also the environment variable "
            "GLM_MULTIUSER_API_KEYS. Default: no authentication."
        ),
    ] = None,
    warm_up: Annotated[
        Optional[Path],
        typer.Option(
            help="Warm-up prompts, one per line; each model runs them before it is ready."
        ),
    ] = None,
    replicas: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            help="Replicas behind one port, each on its own device; requires Ray Serve.",
            show_default="one server, without Ray",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="fastapi: the built-in server. triton: NVIDIA Triton with our model repository; "
            "gRPC and metrics use the next two ports after --port."
        ),
    ] = "fastapi",
    **settings: Any,
) -> None:
    """Serve the OpenAI, Anthropic, KServe v2 (Triton), step and simple APIs and a web page on one
    port.

    Logs go to stderr. SIGTERM or Ctrl-C shuts down gracefully: running requests finish first. A
    second Ctrl-C exits immediately.
    """
    if backend == "triton":
        serve_triton.run(context)
        return
    if backend != "fastapi":
        raise ConfigError(f"--backend is {backend!r}; it must be 'fastapi' or 'triton'")
    try:
        from glm_multiuser.server.hosts import is_address
        from glm_multiuser.server.keys import read_keys
        from glm_multiuser.server.logs import configure_logging
        from glm_multiuser.server.run import listen, serve, url_of
        from glm_multiuser.server.tls import check_certificate
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}; install it with pip install 'glm-multiuser[server]'"
        ) from error

    engine = EngineConfig(**pick(EngineConfig, settings))
    models = (
        *model_settings(checkpoint or [str(loading.DEFAULT_CHECKPOINT)], engine, load=True),
        *model_settings(available or [], engine, load=False),
    )
    given = pick(ServerSettings, settings)
    if warm_up is not None:
        given["warm_up"] = read_prompts(warm_up)
    keys, admins = read_keys(api_keys)
    with named_by_option(Limits, ServerSettings):
        limits = Limits(**pick(Limits, settings))
        server = ServerSettings(models, limits, keys, admins, **given)
    check_certificate(server.tls_cert, server.tls_key)
    if replicas is not None:
        from glm_multiuser.deploy.ray_arguments import WITHOUT
        from glm_multiuser.deploy.ray_local import require_ray, serve_replicas

        for name, why in WITHOUT.items():
            if settings[name]:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is {settings[name]}; with --replicas, {why}")
        require_ray()
    found = [loading.find_checkpoint(one.folder, one.engine.check_fits) for one in models]
    server = replace(
        server, models=tuple(replace(one, folder=path) for one, path in zip(models, found))
    )
    for model in server.models:
        if model.load:
            loading.check_engine(model.folder, model.engine)
    listening = listen(host, port)
    if not is_address(host):
        server = replace(server, allowed_hosts=(*server.allowed_hosts, host))
    url = url_of(listening, server.scheme)
    announce = partial(screen.notice, f"listening on {url}; a browser shows a page there")
    configure_logging(as_json=not sys.stderr.isatty())
    logging.captureWarnings(True)
    if replicas is not None:
        announce()
        serve_replicas(server, replicas, listening)
        return
    asyncio.run(serve(server, listening, announce))


def read_prompts(path: Path) -> tuple[str, ...]:
    """Reads the non-empty lines of a file.

    Raises:
        ConfigError: no such file, or not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the warm-up prompts in {path}: {error}") from error
    return tuple(line for line in lines if line.strip())
