"""A process that starts engines with a compile cache, one after the other.

Prints one line of JSON per engine: the answers to two prompts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from glm_multiuser import MultiUserLLM
from glm_multiuser.model_config import AnyModelConfig
from tests.engine.small_model import CAUSAL, MODEL, one_by_one, prompt

CONFIGS: dict[str, AnyModelConfig] = {
    "causal": replace(CAUSAL, num_layers=1),
    "chatglm-6b": replace(MODEL, num_layers=1),
}
PROMPTS = [prompt(1, 3), prompt(2, 4)]


def main(folder: str, *setups: str) -> None:
    """`setups`: family:users:seq_length."""
    for setup in setups:
        family, users, seq_length = setup.split(":")
        with MultiUserLLM.from_config(
            CONFIGS[family],
            users=int(users),
            seq_length=int(seq_length),
            kernels="portable",
            batch_invariant=False,
            compile_cache_dir=folder,
        ) as llm:
            # Bits depend on who shares a step, because rows are not padded.
            heard = [one.bits for one in one_by_one(llm, PROMPTS)]
            late = llm.stats().compiles_after_ready
        print(json.dumps([heard, late]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
