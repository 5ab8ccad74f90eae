"""A small package with the shape of MindFormers' GLM, in two versions, and patches made by git."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

GLM = "mindformers/models/glm"
CONFIG, LAYERS, MODEL = (f"{GLM}/{name}.py" for name in ("glm_config", "layers", "glm"))

SOURCES = {
    "mindformers/__init__.py": """
__version__ = "1.1"
from mindformers.models.glm.glm import GLMChatModel
from mindformers.models.glm.glm_config import GLMConfig
""",
    "mindformers/models/__init__.py": "",
    "mindformers/tools/__init__.py": "",
    "mindformers/tools/register.py": """
class MindFormerRegister:
    registry = {}

    @classmethod
    def register(cls, module_type):
        def wrapper(one):
            cls.registry.setdefault(module_type, {})[one.__name__] = one
            return one

        return wrapper
""",
    f"{GLM}/__init__.py": "",
    CONFIG: '''
from mindformers.tools.register import MindFormerRegister


class Settings:
    def __init__(self, **settings):
        vars(self).update(settings)


@MindFormerRegister.register("config")
class GLMConfig(Settings):
    """The sizes, of the 模型."""

    def __init__(self, layers=1, **settings):
        super().__init__(**settings)
        self.layers = layers
''',
    LAYERS: """
class Layer:
    def __init__(self, users=None):
        self.past = []

    def construct(self, token):
        self.past.append(token)
        return sum(self.past)


def helper():
    return "as it was"
""",
    MODEL: """
from mindformers.tools.register import MindFormerRegister

from .glm_config import GLMConfig
from .layers import Layer


class GLMPreTrainedModel:
    config_class = GLMConfig

    def __init__(self, config):
        self.config = config


@MindFormerRegister.register("models")
class GLMChatModel(GLMPreTrainedModel):
    def __init__(self, config):
        super(GLMChatModel, self).__init__(config)
        self.layers = [Layer() for _ in range(config.layers)]

    def construct(self, token):
        for layer in self.layers:
            token = layer.construct(token)
        return token
""",
}

Edit = tuple[str, str, str]
"""A path, the text that goes, and the one that comes."""

PATCHES: tuple[tuple[str, tuple[Edit, ...]], ...] = (
    (
        "Give a config its users",
        (
            (
                CONFIG,
                "    def __init__(self, layers=1,",
                "    default_users = 1\n\n    def __init__(self, layers=1, users=None,",
            ),
            (
                CONFIG,
                "layers = layers\n",
                "layers = layers\n        self.users = users or self.default_users\n",
            ),
        ),
    ),
    (
        "Keep the past of every user, which is a subject so long that git folds it over two lines",
        (
            (LAYERS, "\nclass Layer:", "\nclass Past(list):\n    pass\n\n\nclass Layer:"),
            (
                LAYERS,
                "users=None):\n        self.past = []",
                "users):\n        self.past = [Past() for _ in range(users)]",
            ),
            (
                LAYERS,
                "    def construct(self, token):\n        self.past.append(token)\n"
                "        return sum(self.past)",
                "    def construct(self, token, user):\n        self.past[user].append(token)\n"
                "        return sum(self.past[user])",
            ),
            (MODEL, "Layer() for", "Layer(config.users) for"),
        ),
    ),
    (
        "Thread the user 用户 through",
        (
            (MODEL, "    def construct(self, token):", "    def construct(self, token, user=0):"),
            (MODEL, "construct(token)", "construct(token, user)"),
        ),
    ),
)


@dataclass(frozen=True)
class Release:
    """An unpacked wheel; read-only, tests copy it."""

    version: str
    wheel: Path
    patches: Path

    def copied_to(self, folder: Path, patches: int = 0) -> Path:
        """A copy in which git has applied the first few patches."""
        shutil.copytree(self.wheel, folder)
        for patch in sorted(self.patches.iterdir())[:patches]:
            git(folder, "apply", str(patch))
        return folder


def make_release(folder: Path, version: str, own: str) -> Release:
    """A version whose model says `own`; all else is the same in every version."""
    wheel, repository = folder / version, folder / f"git-{version}"
    write(wheel, {**SOURCES, MODEL: f'"""The model of {own}."""\n{SOURCES[MODEL]}'})
    (wheel / f"mindformers-{version}.dist-info").mkdir()
    shutil.copytree(wheel, repository)
    git(repository, "init", "-q")
    commit(repository, "As published")
    for subject, edits in PATCHES:
        for path, before, after in edits:
            text = (repository / path).read_text(encoding="utf-8")
            assert before in text
            write(repository, {path: text.replace(before, after, 1)})
        commit(repository, subject)
    patches = folder / "patches" / f"mindformers-{version}"
    start = f"HEAD~{len(PATCHES)}"
    git(repository, "format-patch", "-q", "--full-index", "-U1", "-N", "-o", str(patches), start)
    return Release(version, wheel, patches)


def write(root: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def commit(repository: Path, message: str) -> None:
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", message)


def git(folder: Path, *words: str) -> None:
    """Runs git without the settings of this machine, and without a repository around `folder`."""
    settings = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    identity = ("-c", "user.name=Somebody", "-c", "user.email=somebody@localhost")
    done = subprocess.run(
        ["git", *identity, *words],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def contents(root: Path) -> dict[str, bytes]:
    """All files under a folder, with their contents."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
