"""The published layouts of checkpoints, each a `Layout`.

`transformers.py` has those of transformers, `chatglm2.py` and `chatglm_6b.py` what THUDM published.
`decoder.py` has the parameters that every causal family fills, `fields.py` and `rope.py` read the
fields of a `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from glm_multiuser.checkpoint.placement import Places


class Layout(NamedTuple):
    """A published layout of checkpoints."""

    model_types: tuple[str, ...]
    """`model_type` of its `config.json`."""
    architectures: tuple[str, ...]
    """What stands in `architectures`."""
    read_config: Callable[[Mapping[str, Any]], Any]
    """The model that a parsed `config.json` describes. What is left out has the default of the
    original configuration class. Raises ConfigError: a size that is missing or cannot work, or
    something that is not computed here."""
    placements: Callable[[Any], Places]
    """Configuration of the model -> name in the checkpoint -> its place, for every weight."""
