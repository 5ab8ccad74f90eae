"""Worker for PyTorch with `transformers`: a GLM with as many parameters, in eager mode.

Static: one batch with all prompts, then one forward pass per token. Continuous: requests go to its
continuous batching, and every token is timed on arrival. Both decode greedily.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from answering import Measure, answer, decode_rate
from transformers import GlmConfig, GlmForCausalLM

PAGE = 256


def start(job: dict[str, Any], at_end: ExitStack) -> tuple[dict[str, Any], Measure]:
    torch.set_num_threads(job["threads"])
    began = time.perf_counter()
    model = random_model(job)
    ready = {"parameters": sum(one.numel() for one in model.parameters())}
    if job["settings"]["batching"] == "static":
        static_round(model, job["users"], 16, 4)  # warm-up

        def once() -> dict[str, Any]:
            return static_round(model, job["users"], job["context"], job["new_tokens"])

    else:
        manager = continuous_manager(model, job)
        at_end.callback(manager.stop, block=True)
        continuous_round(manager, prompts(model, job["users"], 16), 32)  # warm-up

        def once() -> dict[str, Any]:
            asked = prompts(model, job["users"], job["context"])
            return continuous_round(manager, asked, job["new_tokens"])

    return {**ready, "start_s": round(time.perf_counter() - began, 1)}, once


def random_model(job: dict[str, Any]) -> Any:
    """The MLP has three matrices instead of two, each two thirds as wide."""
    shape = job["shape"]
    config = GlmConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=round(shape["inner_hidden_size"] * 2 / 3),
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_attention_heads"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return GlmForCausalLM(config).eval().to(getattr(torch, job["settings"]["dtype"]))


def prompts(model: Any, users: int, length: int) -> Any:
    return torch.randint(10, model.config.vocab_size, (users, length))


@torch.inference_mode()
def static_round(model: Any, users: int, context: int, new_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    found = model(prompts(model, users, context), use_cache=True, logits_to_keep=1)
    tokens = found.logits[:, -1].argmax(-1, keepdim=True)
    prefilled = time.perf_counter()
    for _ in range(new_tokens - 1):
        found = model(tokens, past_key_values=found.past_key_values, use_cache=True)
        tokens = found.logits[:, -1].argmax(-1, keepdim=True)
    seconds = time.perf_counter() - prefilled
    return {"decode_tok_s": users * (new_tokens - 1) / seconds, "prefill_s": prefilled - began}


def continuous_manager(model: Any, job: dict[str, Any]) -> Any:
    """Allocates only the pages that the users need; the default takes most of the free memory."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    pages = -(-(job["context"] + job["new_tokens"]) // PAGE) + 1
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=job["users"] * pages,
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    manager.start()
    return manager


def continuous_round(manager: Any, asked: Any, new_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    moments: dict[str, list[float]] = {}
    for prompt in asked.tolist():
        name = manager.add_request(prompt, max_new_tokens=new_tokens, streaming=True)
        moments[name] = []
    running = len(moments)
    while running:
        output = manager.get_result(timeout=600)
        if output is None or output.error:
            raise RuntimeError(output.error if output else "no token for ten minutes")
        times = moments[output.request_id]
        times += [time.perf_counter()] * (len(output.generated_tokens) - len(times))
        running -= output.is_finished()
    first = max(times[0] for times in moments.values())
    return {"decode_tok_s": decode_rate(list(moments.values())), "prefill_s": first - began}


if __name__ == "__main__":
    answer(start)
