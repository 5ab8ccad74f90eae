"""Published checkpoint layouts, each a `Layout`.

`transformers.py` has those of transformers, `chatglm2.py` and `chatglm_6b.py` those of THUDM.
`decoder.py` has the parameters of all causal families, `fields.py` and `rope.py` read the fields of
a `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from glm_multiuser.checkpoint.placement import Places


class Layout(NamedTuple):
    """A published checkpoint layout."""

    model_types: tuple[str, ...]
    """`model_type` of its `config.json`."""
    architectures: tuple[str, ...]
    """`architectures` of its `config.json`."""
    read_config: Callable[[Mapping[str, Any]], Any]
    """Parsed `config.json` -> model configuration. Missing fields have the defaults of the original
    configuration class. Raises ConfigError for a missing or invalid size, or an unsupported
    feature."""
    placements: Callable[[Any], Places]
    """Model configuration -> placements by name in the checkpoint, for every weight."""
