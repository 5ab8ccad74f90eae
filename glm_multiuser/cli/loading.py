"""Opens models for commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

from glm_multiuser import package_data
from glm_multiuser.cli.screen import notice
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import CheckpointError, ConfigError, InvalidParameterError
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.settings import pick

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.sampling_params import SamplingParams
    from glm_multiuser.structured.grammar import Grammar

DEFAULT_CHECKPOINT = package_data.CHECKPOINT


def find_checkpoint(
    folder: Path, check: Optional[Callable[[AnyModelConfig], None]] = None, weights: bool = True
) -> Path:
    """Returns the checkpoint at the path itself, or relative to the checkout or the package's data,
    or a model of a hub, which is downloaded unless cached.

    Args:
        folder: a folder or a GGUF file, or the name of a model: see `hub.NAME`.
        check, weights: as in `hub.download`.

    Raises:
        CheckpointError: neither path has a `config.json` or is a GGUF file, or the download fails.
    """
    # Imported late, because they import numpy.
    from glm_multiuser.checkpoint import hub
    from glm_multiuser.checkpoint.gguf.find import find_gguf

    for candidate in (folder, package_data.ROOT / folder):
        if os.path.isfile(candidate / "config.json"):  # False also for a name that is too long
            return candidate
        if os.path.exists(candidate) and find_gguf(candidate) is not None:
            return candidate
    if hub.is_name(folder):
        notice(f"downloading what the cache does not have of {folder} ...")
        return hub.download(str(folder), check, weights)
    raise CheckpointError(
        f"no checkpoint at {folder}: a folder with config.json, weights and tokenizer files, or a "
        "GGUF file is needed; name another one with --checkpoint, or a model of Hugging Face as "
        "owner/name"
    )


def model_config(folder: Path) -> AnyModelConfig:
    """Reads the shape of a checkpoint's model; imported late, because `--help` needs no numpy.

    Raises:
        CheckpointError: no checkpoint, or one of an unsupported model.
    """
    from glm_multiuser.checkpoint import read_model_config

    return read_model_config(find_checkpoint(folder))


def check_engine(folder: Path, engine: EngineConfig) -> None:
    """Rejects invalid settings before MindSpore is imported and a server's address is bound.

    Raises:
        CheckpointError: no checkpoint, or one whose tensors do not match its `config.json`.
        ConfigError: settings that do not fit the model or this machine.
    """
    from glm_multiuser import backend_choice, memory
    from glm_multiuser.checkpoint import check_tensors
    from glm_multiuser.sessions.opening import check_folder

    model = model_config(folder)
    engine.check_fits(model)
    backend_choice.check_kernels(engine)
    memory.check_cache_memory(model, engine)
    check_tensors(folder, model)
    check_folder(engine)


def check_chat_format(folder: Path) -> None:
    """Rejects a checkpoint that cannot be asked a question.

    Raises:
        CheckpointError: no tokenizer, or an unreadable one.
        InvalidParameterError: a base model, without a chat format.
    """
    from glm_multiuser.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise CheckpointError(
            f"{folder} has no tokenizer, so prompts must be token ids, which `generate` takes"
        )
    tokenizer.encode_prompt("Who are you?")


def llm_class() -> type[MultiUserLLM]:
    """Imports the class late, because `--help` must not wait for MindSpore."""
    from glm_multiuser.llm import MultiUserLLM

    return MultiUserLLM


def open_llm(checkpoint: Path, *, chat: bool = False, **settings: Any) -> MultiUserLLM:
    """Calls `MultiUserLLM.from_pretrained` with a notice on stderr, because it takes long.

    Args:
        checkpoint: as in `find_checkpoint`.
        chat: whether all prompts are questions.
        settings: of the engine; others are ignored.

    Raises:
        GLMMultiUserError: no such checkpoint, or an invalid setting.
    """
    engine = EngineConfig(**pick(EngineConfig, settings))
    folder = find_checkpoint(checkpoint, engine.check_fits)
    check_engine(folder, engine)
    if chat:
        check_chat_format(folder)
    notice(f"loading {folder} and compiling its graphs for {engine.users} users ...")
    return llm_class().from_pretrained(str(folder), **vars(engine))


def sampling_params(**settings: Any) -> SamplingParams:
    """Creates `SamplingParams` from a command's options; imported late, too.

    Raises:
        InvalidParameterError: a value out of range.
    """
    from glm_multiuser.sampling_params import SamplingParams

    return SamplingParams(**settings)


def json_grammar(file: Optional[Path]) -> Optional[Grammar]:
    """Returns the grammar of a file with a JSON schema; None without a file.

    Raises:
        ConfigError: the file is unreadable, or not a JSON schema.
        InvalidParameterError: llguidance is not installed.
    """
    if file is None:
        return None
    from glm_multiuser.structured.compiler import library
    from glm_multiuser.structured.grammar import Grammar

    library()
    try:
        return Grammar.json_schema(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not in UTF-8: {error.reason}") from None
    except InvalidParameterError as error:
        raise ConfigError(f"{file}: {error}") from None


def check_grammar(llm: MultiUserLLM, grammar: Optional[Grammar]) -> None:
    """Rejects a grammar that cannot be compiled before the first prompt.

    Raises:
        ConfigError: an unsupported or too large grammar.
    """
    if grammar is not None:
        try:
            llm.compile_grammar(grammar)
        except InvalidParameterError as error:
            raise ConfigError(f"json_schema: {error}") from None
