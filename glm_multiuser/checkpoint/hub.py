"""Downloads models from Hugging Face or ModelScope into the hub's local cache.

The hub clients are an extra. They honour their environment variables (HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE, HF_TOKEN, MODELSCOPE_ENDPOINT, MODELSCOPE_CACHE), show progress bars, and keep
partial files of interrupted transfers.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Callable, Optional, Union

from glm_multiuser.checkpoint.families import read_model_config
from glm_multiuser.checkpoint.huggingface import SHARDS, has_weights, read_shard_names
from glm_multiuser.errors import CheckpointError, shown
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.tokenizers import FILES_READ

NAME = re.compile(
    r"(?P<prefix>modelscope:)?(?P<repository>\w[\w.-]*/\w[\w.-]*)(?<!\.gguf)"
    r"(?:/(?P<file>(?:\w[\w.-]*/)*\w[\w.-]*\.gguf))?",
    re.ASCII,
)
"""owner/name or owner/name/file.gguf, with an optional hub prefix."""

SMALL_FILES = ("config.json", *FILES_READ)
PART = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")
"""End of the name of a split GGUF file."""

ATTEMPTS = 10
"""Attempts per download; only interrupted transfers are retried."""

Check = Callable[[AnyModelConfig], None]
Download = Callable[..., str]


def is_name(place: Union[str, Path]) -> bool:
    """Whether this path does not exist and is a valid name of a model on a hub."""
    return not os.path.exists(place) and NAME.fullmatch(str(place)) is not None


def local_path(place: Union[str, Path], check: Optional[Check] = None) -> Path:
    """Returns the path itself, or that of the model with this name, from `download`.

    Raises:
        CheckpointError: neither a path nor a name, or as `download`.
    """
    if not isinstance(place, (str, os.PathLike)):
        raise CheckpointError(f"checkpoint is {shown(place)}; it must be a path or a name")
    return download(str(place), check) if is_name(place) else Path(place)


def download(name: str, check: Optional[Check] = None, weights: bool = True) -> Path:
    """Downloads the needed files of a model that are not in the hub's cache.

    Args:
        name: matches `NAME`.
        check: called with the model's shape before its weights are downloaded; not for a GGUF file.
        weights: whether to download the weights.

    Returns:
        A folder in Hugging Face layout; or the GGUF file, with its other parts in the same folder.

    Raises:
        CheckpointError: the hub's client is not installed, the files are missing or access to them
            is denied, the transfer failed, or the model is not supported.
        Exception: what `check` raises.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"model is {name!r}; it must be owner/name or owner/name/file.gguf")

    def fetch(patterns: Iterable[str]) -> Path:
        return _fetch(name, match["repository"], bool(match["prefix"]), list(patterns))

    if match["file"]:
        file = fetch([PART.sub(r"-*-of-\1", match["file"])]) / match["file"]
        if not file.is_file():
            raise CheckpointError(f"model {name!r}: {match['repository']} has no such file")
        return file
    folder = fetch(SMALL_FILES)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model {name!r} has no config.json; if it has GGUF files, add the name of one: "
            f"{name}/file.gguf"
        )
    config = read_model_config(folder)
    if check is not None:
        check(config)
    if not weights:
        return folder
    for single, shards in SHARDS.items():
        index = f"{single}.index.json"
        folder = fetch((*SMALL_FILES, single, index, shards))
        if (folder / index).is_file() and not (folder / single).exists():
            names = set(read_shard_names(folder / index).values())
            missing = sorted(one for one in names if not os.path.exists(folder / one))
            folder = fetch(map(glob.escape, missing)) if missing else folder
        if has_weights(folder):
            return folder
    raise CheckpointError(f"model {name!r} has no weights: neither {' nor '.join(SHARDS)} is there")


def _fetch(name: str, repository: str, modelscope: bool, patterns: list[str]) -> Path:
    """Downloads matching files into the cache; returns the folder of all files of the model."""
    hub = "ModelScope" if modelscope else "Hugging Face"
    try:
        snapshot_download = _modelscope() if modelscope else _hugging_face()
    except ImportError as error:
        raise CheckpointError(
            f"model {name!r} is no path; to download it from {hub}, install {error.name} with "
            "pip install 'glm-multiuser[hub]'"
        ) from error
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return Path(snapshot_download(repository, allow_patterns=patterns))
        except Exception as error:  # the clients' errors have no other common base class
            if attempt == ATTEMPTS or not _is_cut(error):
                raise CheckpointError(
                    f"model {name!r} is no path, and cannot be downloaded from {hub}: "
                    f"{_reason(error)}"
                ) from error
    raise AssertionError("the last attempt returns or raises")


def _hugging_face() -> Download:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """Shown only on a terminal."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": options.get("disable") or None})

    return lambda *args, **options: snapshot_download(*args, **options, tqdm_class=Bar)


def _modelscope() -> Download:
    from modelscope.hub.snapshot_download import snapshot_download

    def download(*args: Any, **options: Any) -> str:
        # Before 1.38, the client ignores this variable, and logs to stdout.
        endpoint = os.environ.get("MODELSCOPE_ENDPOINT")
        with redirect_stdout(sys.stderr):
            return str(snapshot_download(*args, **options, endpoint=endpoint))

    return download


def _is_cut(error: Exception) -> bool:
    """Whether a transfer was interrupted and can be resumed.

    Checks the error's class name, because requests may not be installed. Only huggingface_hub
    before 1.0 leaves retries to its callers.
    """
    return any(kind.__name__ == "ChunkedEncodingError" for kind in type(error).__mro__)


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"access is denied (HTTP {status}). There is no such model, or it is private or gated: "
            "then accept its conditions on its page, and set HF_TOKEN or MODELSCOPE_API_TOKEN"
        )
    if status == 404:
        return "there is no such model (HTTP 404)"
    return " ".join(str(error).split()) or type(error).__name__
