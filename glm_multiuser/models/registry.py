"""Which model computes a family; the only place to enter a new one."""

from __future__ import annotations

from glm_multiuser.config import AnyModelConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.models.kv_past import NO_USERS
from glm_multiuser.models.layers import Numerics
from glm_multiuser.models.modeling_chatglm import ChatGLMForMultiUser
from glm_multiuser.models.modeling_glm import GLMForMultiUser
from glm_multiuser.models.modeling_qwen2 import Qwen2ForMultiUser
from glm_multiuser.models.users import MultiUserModel

MODELS: dict[str, type[MultiUserModel]] = {
    "chatglm-6b": GLMForMultiUser,
    "chatglm": ChatGLMForMultiUser,
    "qwen2": Qwen2ForMultiUser,
}


def make_model(config: AnyModelConfig, numerics: Numerics) -> MultiUserModel:
    """A model of this shape without users, its weights zero.

    Raises:
        ConfigError: a family that is not in `MODELS`.
    """
    if config.family not in MODELS:
        raise ConfigError(f"family is {config.family!r}; it must be one of {', '.join(MODELS)}")
    return MODELS[config.family](config, numerics, NO_USERS)
