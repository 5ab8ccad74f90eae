"""Opens an engine's session store as configured."""

from __future__ import annotations

import logging
from typing import Callable, Optional

from glm_multiuser.config import EngineConfig, folder_of
from glm_multiuser.errors import ConfigError
from glm_multiuser.sessions.folder import SessionFolder, open_folder
from glm_multiuser.sessions.store import SessionStore
from glm_multiuser.sizes import bytes_of

logger = logging.getLogger(__name__)


def check_folder(config: EngineConfig) -> None:
    """Raises ConfigError if `session_dir` cannot be used; creates it unless it is there.

    For the start of a command. An engine that starts later, as after a failure, must answer in any
    case: see `open_store`.
    """
    if not config.session_dir or not config.cache_prompt:
        return
    try:
        open_folder(folder_of("session_dir", config.session_dir))
    except OSError as error:
        raise ConfigError(
            f"session_dir is {config.session_dir!r}, but sessions cannot be kept there: {error}"
        ) from error


def open_store(
    config: EngineConfig, fingerprint: Callable[[], str], is_causal: bool
) -> SessionStore:
    """Opens a session store; without `session_memory` and `session_dir` it keeps nothing. Logs a
    warning if the folder cannot be used, or if `cache_prompt` is False.

    Args:
        fingerprint: of the engine; called only if there is a folder.
        is_causal: whether the model can reuse a KV cache.
    """
    if not config.cache_prompt:
        if config.session_memory or config.session_dir:
            logger.warning("no sessions are kept: cache_prompt is False")
        return SessionStore()
    memory = bytes_of("session_memory", config.session_memory) if config.session_memory else 0
    folder = _open_folder(config, fingerprint) if config.session_dir else None
    if (memory or folder) and not is_causal:
        logger.info("of sessions only token ids are kept: this model's prompts are prefilled whole")
    return SessionStore(memory, folder, config.session_ttl)


def _open_folder(config: EngineConfig, fingerprint: Callable[[], str]) -> Optional[SessionFolder]:
    path = folder_of("session_dir", config.session_dir or "")
    limit = bytes_of("session_disk", config.session_disk)
    try:
        return SessionFolder(path, limit, config.session_ttl, fingerprint())
    except OSError as error:
        logger.warning("sessions are not kept on disk: %s", error)
        return None
