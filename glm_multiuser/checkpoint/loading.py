"""A checkpoint of any family into the model's parameters, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, Optional

from glm_multiuser.checkpoint.ckpt_file import find_ckpt, save_ckpt
from glm_multiuser.checkpoint.huggingface import WEIGHTS, has_weights
from glm_multiuser.checkpoint.json_file import write_json
from glm_multiuser.checkpoint.layouts import layout_of_config, mindformers_placements
from glm_multiuser.checkpoint.matching import match_ckpt, match_huggingface
from glm_multiuser.checkpoint.placement import Places, to_their_layout
from glm_multiuser.checkpoint.safetensors_file import Sizes, save_safetensors
from glm_multiuser.checkpoint.stored_tensor import Array
from glm_multiuser.config import AnyModelConfig
from glm_multiuser.errors import CheckpointError

CKPT = "model.ckpt"
"""What a `.ckpt` file is called that is written here; any name is read."""


def load_checkpoint(
    folder: Path,
    config: AnyModelConfig,
    parameters: Sizes,
    assign: Callable[[str, Array], None],
    progress: Optional[Callable[[int, int, str], None]] = None,
) -> None:
    """Fills every parameter of a model from a folder, one at a time.

    Names and shapes are all checked before the first parameter is assigned, so a checkpoint that
    does not fit is refused at once. Beyond the weights, memory holds one parameter and a block of
    `BLOCK_BYTES` that is converted.

    Args:
        folder: in Hugging Face layout, with safetensors or pytorch_model*.bin, or with MindFormers'
            `.ckpt`, in one file or in pieces; of several kinds, the first one named here counts.
        config: of the model.
        parameters: the model's parameters, without caches: name -> shape, with weights as
            [out, in], and dtype.
        assign: takes a parameter's name and its values, of exactly that shape and dtype.
        progress: told (number of parameters done, all of them, name of the next one).

    Raises:
        CheckpointError: a tensor that is missing, superfluous, of another shape, or too large
            for its parameter's dtype; a file that `open_folder` or `open_ckpt` refuses.
    """
    folder = Path(folder)
    only_ckpt = bool(find_ckpt(folder)) and not has_weights(folder)
    match = match_ckpt if only_ckpt else match_huggingface
    matched = match(folder, config, {name: shape for name, (shape, _) in parameters.items()})
    for done, parameter in enumerate(matched):
        if progress is not None:
            progress(done, len(matched), parameter.name)
        dtype = parameters[parameter.name][1]
        assign(parameter.name, parameter.read(config.num_attention_heads, dtype))


def write_huggingface(folder: Path, config: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes `config.json` and `model.safetensors`, each complete or not at all.

    Args:
        folder: is created if need be. Shards and an index that are there stay, and readers
            prefer the single file to them.
        config: the content of `config.json`; it says which layout is written.
        arrays: every weight of the model in our names and layouts.

    Raises:
        ConfigError: `config` is not one of a model that can be read.
        CheckpointError: the arrays are not exactly the weights of such a model.
    """
    layout = layout_of_config(config)
    model = layout.read_config(config)
    places = layout.placements(model)
    _check_exact(places, arrays)
    sizes = {
        name: (place.shape({place.name: arrays[place.name].shape}), arrays[place.name].dtype)
        for name, place in places.items()
        if place is not None
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(folder / WEIGHTS, sizes, _laid_out(places, arrays, model))
    write_json(folder / "config.json", config)


def write_mindformers(folder: Path, config: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes `config.json` and MindFormers' `model.ckpt`, each complete or not at all.

    Arguments and errors are those of `write_huggingface`, but a reader that finds safetensors in
    the folder prefers those.
    """
    model = layout_of_config(config).read_config(config)
    places = mindformers_placements(model)
    _check_exact(places, arrays)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_ckpt(folder / CKPT, _laid_out(places, arrays, model))
    write_json(folder / "config.json", config)


def _check_exact(places: Places, arrays: Mapping[str, Array]) -> None:
    wrong = {place.name for place in places.values() if place} ^ set(arrays)
    if wrong:
        raise CheckpointError(f"{min(wrong)} is missing, or is no weight of this model")


def _laid_out(
    places: Places, arrays: Mapping[str, Array], model: AnyModelConfig
) -> Iterator[tuple[str, Array]]:
    for name, place in places.items():
        if place is not None:
            yield name, to_their_layout(arrays[place.name], place, model.num_attention_heads)
