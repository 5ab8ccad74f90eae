"""One run of the benchmark: one number of users on one engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from glm_multiuser.cli import loading, measure, screen
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import AnyModelConfig, ModelConfig

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run, of a `checkpoint` folder or a `shape` with random weights."""

    users: int
    seq_length: int
    prompt_tokens: int
    new_tokens: int
    repeat: int = 1
    checkpoint: Optional[str] = None
    shape: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 3:
            raise ConfigError(
                f"prompt-tokens is {self.prompt_tokens}; the two special ids that end a prompt "
                "need at least 3"
            )
        if self.prompt_tokens + self.new_tokens > self.seq_length:
            raise ConfigError(
                f"prompt-tokens {self.prompt_tokens} + new-tokens {self.new_tokens} is more than "
                f"seq-length {self.seq_length}"
            )

    def model_config(self) -> AnyModelConfig:
        if self.checkpoint is not None:
            return loading.model_config(Path(self.checkpoint))
        return ModelConfig(**self.shape)

    def engine(self) -> EngineConfig:
        """Returns the engine's settings; its queue has room for every user."""
        config = EngineConfig(users=self.users, seq_length=self.seq_length, **self.options)
        return replace(config, max_queue=max(config.max_queue, self.users))


def users_text(users: int) -> str:
    return "1 user" if users == 1 else f"{users} users"


def check_engine(settings: RunSettings) -> None:
    """Rejects invalid settings before a process is started; raises as `loading`."""
    from glm_multiuser import backend_choice
    from glm_multiuser.sessions.opening import check_folder

    engine = settings.engine()
    if settings.checkpoint is not None:
        loading.check_engine(Path(settings.checkpoint), engine)
        return
    engine.check_fits(settings.model_config())
    backend_choice.check_kernels(engine)
    check_folder(engine)


def open_engine(settings: RunSettings) -> MultiUserLLM:
    """Opens the engine of a run."""
    options = vars(settings.engine())
    if settings.checkpoint is not None:
        return loading.llm_class().from_pretrained(settings.checkpoint, **options)
    return loading.llm_class().from_config(settings.model_config(), seed=0, **options)


def prompts_of(settings: RunSettings) -> list[list[int]]:
    """Returns a random prompt per user; those of ChatGLM-6B end with its special ids."""
    config = settings.model_config()
    ending = (config.gmask_token_id, config.bos_token_id) if isinstance(config, ModelConfig) else ()
    return measure.random_prompts(settings.users, settings.prompt_tokens, config.vocab_size, ending)


def run(settings: RunSettings) -> dict[str, Any]:
    """Opens, measures and closes the engine."""
    prompts = prompts_of(settings)
    with open_engine(settings) as llm, screen.progress_bar() as bar:
        total = settings.users * settings.new_tokens * settings.repeat
        task = bar.add_task(f"{users_text(settings.users)}: tokens", total=total)
        result = measure.measure(
            llm,
            prompts,
            settings.new_tokens,
            settings.repeat,
            on_progress=lambda tokens: bar.update(task, completed=tokens),
        )
    return {**result, "peak_rss_mb": round(measure.peak_rss_mb(), 1)}
