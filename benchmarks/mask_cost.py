"""Measures structured output's mask overhead: decode steps with and without a grammar per row.

    python benchmarks/mask_cost.py [--users 16] [--tokens 60] [--repeats 5]

Random weights of hidden size 1024 and 12 layers, with the tokenizer of a checkpoint. All users
decode concurrently; plain and structured answers of equal length alternate. The schema's strings
are unconstrained, which gives the largest masks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from typing import Any

from glm_multiuser import CausalConfig, Grammar, MultiUserLLM, SamplingParams
from glm_multiuser.tokenizers import load_tokenizer

SMOLLM2 = "ckpt/SmolLM2-135M-Instruct.Q4_1.gguf"
"""`make smollm2` fetches it; its tokenizer has 49,152 tokens."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "integer"},
        "inner": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
    "required": ["name", "tags", "size", "inner"],
    "additionalProperties": False,
}
MIXES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"top_p": 0.9}}


def step_ms(llm: MultiUserLLM, users: int, tokens: int, structured: bool, mix: str) -> float:
    """Median milliseconds of a decode step of all users."""
    seconds: list[float] = []
    llm.on_step(
        lambda report: (
            seconds.append(report.seconds)
            if report.kind == "decode" and report.rows == users
            else None
        )
    )
    grammar = Grammar.json_schema(SCHEMA) if structured else None
    settings = {"max_tokens": tokens, "ignore_eos": not structured, **MIXES[mix]}
    handles = [
        llm.submit([5, 6, user], params=SamplingParams(grammar=grammar, seed=user, **settings))
        for user in range(users)
    ]
    for handle in handles:
        assert handle.result().error is None
    return statistics.median(seconds) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpoint", default=SMOLLM2, help="of the tokenizer")
    arguments = parser.parse_args()
    users, tokens = arguments.users, arguments.tokens
    tokenizer = load_tokenizer(arguments.checkpoint)
    assert tokenizer is not None
    config = CausalConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=1024,
        num_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        inner_hidden_size=2816,
        max_sequence_length=512,
        eos_token_ids=tokenizer.stop_token_ids,
        rotary_dim=64,
    )
    llm = MultiUserLLM.from_config(config, users=users, seq_length=256)
    llm.tokenizer = tokenizer
    runs = []
    for mix in MIXES:
        step_ms(llm, users, 8, True, mix)
        pairs = [
            [step_ms(llm, users, tokens, structured, mix) for structured in (False, True)]
            for _ in range(arguments.repeats)
        ]
        plain, masked = (statistics.median(column) for column in zip(*pairs))
        ratio = statistics.median(masked / plain for plain, masked in pairs)
        runs.append({"mix": mix, "plain_ms": plain, "structured_ms": masked, "ratio": ratio})
    conditions = {
        "users": users,
        "tokens": tokens,
        "hidden_size": 1024,
        "num_layers": 12,
        "vocab_size": tokenizer.vocab_size,
        "kernels": llm.stats().kernel_level,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": round(os.getloadavg()[0], 2),
    }
    llm.close(drain=0)
    print(json.dumps({"conditions": conditions, "runs": runs}))


if __name__ == "__main__":
    main()
