"""What a checkpoint's author recommends for sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm_multiuser.checkpoint.json_file import read_json_object
from glm_multiuser.errors import CheckpointError

FIELDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "do_sample": ("do_sample", (bool,)),
    "temperature": ("temperature", (int, float)),
    "top_k": ("top_k", (int,)),
    "top_p": ("top_p", (int, float)),
    "repetition_penalty": ("repetition_penalty", (int, float)),
    "max_new_tokens": ("max_tokens", (int,)),
}
"""Key in `generation_config.json` -> field of `SamplingParams`, and what may stand there."""


def read_generation_defaults(folder: Path) -> dict[str, Any]:
    """Reads `generation_config.json` into fields of `SamplingParams`.

    Returns:
        The fields that the file sets; empty without such a file. Its other keys, and those that
        are null, are left out. `do_sample: false` becomes a temperature of 0, which is greedy.

    Raises:
        CheckpointError: the file cannot be read, or a value has the wrong type.
    """
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return {}
    values = read_json_object(path)
    defaults: dict[str, Any] = {}
    for key, (field, types) in FIELDS.items():
        value = values.get(key)
        if value is None:
            continue
        # bool is an int to Python, but `top_k: true` is a mistake.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(one.__name__ for one in types)
            raise CheckpointError(f"{key} in {path} is {value!r}; it must be {wanted}")
        defaults[field] = value
    if defaults.pop("do_sample", True) is False:
        defaults["temperature"] = 0.0
    return defaults
