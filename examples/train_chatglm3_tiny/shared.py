"""Imports the corpus and the recipe of glm-tiny's training."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "ckpt" / "chatglm3-tiny"

# After this folder, whose modules have the same names.
sys.path.append(str(HERE.parent / "train_glm_tiny"))

from corpus import (  # noqa: E402
    CORPUS,
    Exchange,
    corpus_lines,
    groups_of_similar_size,
    loosely_asked,
    read_dialogues,
    train_pieces,
)
from recipe import (  # noqa: E402
    REQUIRED_ACCURACY,
    fit,
    round_to_half,
    save,
    score,
    settings_parser,
    use_cpu,
)

__all__ = [
    "CORPUS",
    "DEFAULT_FOLDER",
    "HERE",
    "REQUIRED_ACCURACY",
    "Exchange",
    "corpus_lines",
    "fit",
    "groups_of_similar_size",
    "loosely_asked",
    "read_dialogues",
    "round_to_half",
    "save",
    "score",
    "settings_parser",
    "train_pieces",
    "use_cpu",
]
