"""The installed MindFormers 1.3.2, made multi-user in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from glm_multiuser.mindformers.series import read_all_series
from glm_multiuser.mindformers.tree import Tree, open_tree
from tests.mindformers.children import CHECKOUT

PROGRAM = """
import json
import mindspore
from mindformers import GLMChatModel, GLMConfig
from mindformers.tools.register import MindFormerRegister


class Own(GLMChatModel):
    pass


from glm_multiuser.errors import PatchError
from glm_multiuser.mindformers import enable

enable(3)
mindspore.set_context(mode=mindspore.GRAPH_MODE)
sizes = dict(hidden_size=32, num_heads=2, num_layers=1, inner_hidden_size=64, vocab_size=64)
tokens = dict(bos_token_id=60, eos_token_id=61, mask_token_id=58, gmask_token_id=59)
types = ("compute_dtype", "param_init_type", "layernorm_compute_type", "softmax_compute_type")
config = GLMConfig(
    use_past=True, seq_length=16, **sizes, **tokens, **dict.fromkeys(types, "float32")
)
model = Own(config)
model.set_train(False)


class Tokenizer:
    def decode(self, ids):
        return str(ids)


def one_token(user):
    prompt = [5, 6, 59, 60]
    text = model._stream_chat(
        prompt, 1, 1.0, 1.0, len(prompt) + 1, -1, tokenizer=Tokenizer(), qi=user
    )
    return "".join(text)


try:
    next(model._stream_chat([[5, 6], [59, 60]], 1, 1.0, 1.0, 8, -1, tokenizer=Tokenizer()))
    refusal = ""
except ValueError as error:
    refusal = str(error)
registry = MindFormerRegister.registry
enable(4)
print(json.dumps({
    "users": [config.users, GLMConfig().users],
    "pasts": len(model.transformer.layers[0].kv_past),
    "answers": [one_token(0), one_token(2)],
    "refusal": refusal,
    "registered": [
        registry["models"]["GLMChatModel"] is GLMChatModel,
        registry["config"]["GLMConfig"] is GLMConfig,
    ],
}))
"""


def installed_tree() -> Tree:
    spec = find_spec("mindformers")
    assert spec is not None
    assert spec.origin is not None
    return open_tree(Path(spec.origin).parent, read_all_series())


def test_a_small_model_prefills_for_two_users(tmp_path: Path) -> None:
    before = installed_tree()
    program, temporary = tmp_path / "program.py", tmp_path / "temporary"
    program.write_text(PROGRAM)
    temporary.mkdir()
    child = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert "[ERROR]" not in child.stdout + child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["users"] == [3, 4]
    assert found["pasts"] == 3
    assert found["answers"][0] == found["answers"][1] != ""
    assert found["refusal"].startswith("origin_inputs has shape (2, 2), one prompt has ")
    assert found["registered"] == [True, True]
    assert installed_tree() == before
    assert list(temporary.glob("glm_multiuser-*")) == []


SMALL = """
    hidden_size=32, num_heads=2, num_layers=1, inner_hidden_size=64, vocab_size=64, seq_length=16,
    bos_token_id=60, eos_token_id=61, mask_token_id=58, gmask_token_id=59,
    compute_dtype="float32", param_init_type="float32",
"""
ENDING = """
class Tokenizer:
    def decode(self, ids):
        return str(ids)


model.set_train(False)
print(len("".join(model._stream_chat([5, 6, 59, 60], 1, 1.0, 1.0, 5, -1, tokenizer=Tokenizer()))))
"""


@pytest.mark.parametrize("document", ["docs/mindformers.md", "patches/README.md"])
def test_the_documented_lines_make_a_model_that_answers(document: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (CHECKOUT / document).read_text("utf-8"), re.DOTALL)
    (block,) = (one for one in blocks if "enable(" in one)
    program = tmp_path / "program.py"
    program.write_text(block.replace("GLMConfig(use_past", f"GLMConfig({SMALL} use_past") + ENDING)
    child = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout.splitlines()[-1]) > 0
