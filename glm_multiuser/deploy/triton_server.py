"""Finds, sets up, starts and stops the `tritonserver` of the wheel nvidia-pytriton."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from glm_multiuser.errors import ConfigError

END_SECONDS = 20
"""Shutdown timeout of running requests, and then of the models' processes. A request lost with a
killed process uses all of it."""

SHARED_MEMORY = Path("/dev/shm")
LAST_PORT = 65535


@dataclass(frozen=True)
class Ports:
    """Ports of the server."""

    http: int
    grpc: int
    metrics: int


def address_of(host: str) -> str:
    """Returns the IPv4 address of a host; `tritonserver` resolves no names and never gets ready.

    Raises:
        ConfigError: it has none.
    """
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host is {host!r}; it must be an IPv4 address or a name of one: {error}"
        ) from error


def choose_ports(host: str, port: int) -> Ports:
    """Returns `port` and the next two, like Triton's 8000, 8001, 8002; for 0, any free ones.

    Raises:
        ConfigError: a port that is in use or too high, or an address that is not local.
    """
    if port > LAST_PORT - 2:
        raise ConfigError(
            f"port is {port}; Triton takes the next two, too, so it must be at most {LAST_PORT - 2}"
        )
    wanted = (port, port + 1, port + 2) if port else (0, 0, 0)
    taken = []
    with ExitStack() as sockets:
        for number in wanted:
            try:
                listening = sockets.enter_context(socket.create_server((host, number)))
            except OSError as error:
                raise ConfigError(f"cannot listen on {host}:{number}: {error}") from error
            taken.append(listening.getsockname()[1])
    return Ports(*taken)


def find_tritonserver() -> Path:
    """Returns the folder of the wheel that has `bin/tritonserver`.

    Raises:
        ConfigError: it is not installed.
    """
    found = importlib.util.find_spec("pytriton")
    for place in (found.submodule_search_locations or ()) if found else ():
        folder = Path(place) / "tritonserver"
        if (folder / "bin" / "tritonserver").is_file():
            return folder
    raise ConfigError(
        "the backend triton needs nvidia-pytriton; install it with "
        "pip install 'glm-multiuser[triton]'"
    )


class TritonServer:
    """A `tritonserver` process without loaded models; its log goes to stderr.

    Args:
        repository: of models.
        backends: directory of backends, of `make_backends`.
        host, ports: to listen on.

    Raises:
        ConfigError: the wheel is not installed.
    """

    def __init__(self, repository: Path, backends: Path, host: str, ports: Ports) -> None:
        self.host = host
        self.ports = ports
        self._region = f"glm_multiuser_{os.getpid()}_{ports.http}_"
        folder = find_tritonserver()
        self.process = subprocess.Popen(
            self._command(folder, repository, backends),
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            stderr=sys.stderr.fileno(),
            start_new_session=True,  # a Ctrl-C on the terminal must not reach it
        )

    def exit_code(self) -> Optional[int]:
        """The exit code; None while it runs."""
        return self.process.poll()

    def stub(self, model: str) -> Optional[int]:
        """The PID of a model's process; None if there is none."""
        return find_stub(self.process.pid, model)

    def stop(self) -> None:
        """Shuts down gracefully, kills remaining processes, and removes their shared memory."""
        self.process.terminate()
        try:
            self.process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(ProcessLookupError):  # remaining stubs, in the server's process group
            os.killpg(self.process.pid, signal.SIGKILL)
        for region in SHARED_MEMORY.glob(self._region + "*"):
            region.unlink(missing_ok=True)

    def _command(self, folder: Path, repository: Path, backends: Path) -> list[str]:
        return [
            str(folder / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self._region}",
            "--model-control-mode=explicit",
            "--disable-auto-complete-config",
            f"--http-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.ports.metrics}",
            "--allow-gpu-metrics=false",
            "--log-info=false",
            f"--exit-timeout-secs={END_SECONDS}",
        ]


def make_backends(backends: Path) -> None:
    """Creates a directory with the Python backend and the stub for this Python.

    Raises:
        ConfigError: the wheel is not installed, or has no stub for this Python.
    """
    folder = find_tritonserver()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = folder / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ConfigError(f"nvidia-pytriton has no stub for Python {version} at {stub}")
    shutil.copytree(folder / "backends" / "python", backends / "python")
    shutil.copy2(stub, backends / "python")


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment, with the library paths and this Python's packages."""
    packages = folder.parents[1]
    # This interpreter's own library first: another version is not compatible with its modules.
    libraries = [sysconfig.get_config_var("LIBDIR"), str(packages / "nvidia_pytriton.libs")]
    earlier = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, *([earlier] if earlier else [])]),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "LANG": "C.UTF-8",
    }


def find_stub(server: int, model: str) -> Optional[int]:
    """The PID of a model's process, a child of the server; None if there is none."""
    file = f"/{model}/1/model.py"
    for pid in children(server):
        # Empty for a zombie.
        if any(part.endswith(file) for part in _read(f"/proc/{pid}/cmdline").split("\0")):
            return pid
    return None


def children(pid: int) -> list[int]:
    """PIDs of the children of a process, started by any of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in _read(task).split()]


def _read(path: Union[str, Path]) -> str:
    """Reads a file of /proc; empty if its process has ended."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
