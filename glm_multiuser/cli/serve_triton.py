"""`glm-multiuser serve --backend triton`: its options and its start."""

import sys
from pathlib import Path
from typing import Any, Optional

import typer

from glm_multiuser.cli import loading, screen
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.settings import pick

OPTIONS = ("backend", "checkpoint", "host", "port")
"""Options besides the settings of an engine."""


def run(context: typer.Context) -> None:
    """Serves our Triton model repository with the command's options.

    Raises:
        ConfigError: an option that Triton does not support, a missing extra, or a model that cannot
            be loaded.
    """
    given = context.params
    names = {name: option for option in context.command.params for name in [option.name]}
    allowed = (*OPTIONS, *pick(EngineConfig, given))
    for name, option in names.items():
        # By name, because typer bundles its own click, with different classes.
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name != "DEFAULT":
            raise ConfigError(
                f"{option.opts[0]} is no option of --backend triton; it takes "
                + ", ".join(names[one].opts[0] for one in allowed[1:])
            )
    try:
        from glm_multiuser.deploy.triton_run import serve
        from glm_multiuser.deploy.triton_server import address_of, choose_ports, find_tritonserver
        from glm_multiuser.server.logs import configure_logging
    except ImportError as error:
        raise ConfigError(
            f"the backend triton needs {error.name}; install it with "
            "pip install 'glm-multiuser[triton]'"
        ) from error
    find_tritonserver()
    parameters = parameters_of(given)
    host = address_of(given["host"])
    ports = choose_ports(host, given["port"])
    screen.notice(
        f"Triton on http://{host}:{ports.http} (gRPC {host}:{ports.grpc}, "
        f"metrics http://{host}:{ports.metrics}/metrics)"
    )
    configure_logging(as_json=not sys.stderr.isatty())
    serve(parameters, host, ports)


def parameters_of(given: dict[str, Any]) -> dict[str, object]:
    """Returns the parameters of a model's `config.pbtxt` for the command's options.

    Raises:
        CheckpointError: as `loading.check_engine`.
        ConfigError: several checkpoints, or as `loading.check_engine`.
    """
    places: Optional[list[str]] = given["checkpoint"]
    if places and len(places) > 1:
        raise ConfigError(f"--checkpoint is given {len(places)} times; Triton serves one of them")
    place = places[0] if places else str(loading.DEFAULT_CHECKPOINT)
    engine = EngineConfig(**pick(EngineConfig, given))
    checkpoint = loading.find_checkpoint(Path(place), engine.check_fits).absolute()
    loading.check_engine(checkpoint, engine)
    return {"checkpoint": checkpoint, **vars(engine)}
