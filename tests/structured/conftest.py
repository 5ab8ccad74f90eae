"""The tokenizers of every family."""

from tests.tokenizers.conftest import (  # noqa: F401
    chatglm3_folder,
    family_folders,
    glm4_folder,
    qwen2_folder,
    small_tokenizer,
    train_file,
    trained_file,
)
