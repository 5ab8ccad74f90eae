"""`from_pretrained` with the name of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.errors import CheckpointError, ConfigError
from tests.checkpoint.folders import QWEN2, arrays_of, write_folder, write_json
from tests.checkpoint.hub_server import only_hub


def test_from_pretrained_downloads_a_model_whose_shape_fits(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", arrays_of({**QWEN2, "num_hidden_layers": 1}))
    write_json(folder / "config.json", QWEN2)
    with only_hub(tmp_path / "cache") as hub:
        hub.add("some-owner/tiny", folder)
        with pytest.raises(ConfigError, match="seq_length is 65; this model's max_sequence_length"):
            MultiUserLLM.from_pretrained("some-owner/tiny", seq_length=65)
        assert hub.transferred() == {"config.json"}
        # These weights lack a layer, which is found before anything is compiled.
        with pytest.raises(CheckpointError, match=r"layers\.1\."):
            MultiUserLLM.from_pretrained("some-owner/tiny", seq_length=64)
        assert hub.transferred() == {"config.json", "model.safetensors"}
