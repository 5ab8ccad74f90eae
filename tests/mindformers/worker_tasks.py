"""In the child: what the tests of every version and of the reference values want to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
from mindformers import GLMChatModel
from mindspore import Tensor

from tests.mindformers.worker_model import make_model
from tests.mindformers.worker_streams import Answer, Prompt, Streams


def generate(folder: str, prompts: Sequence[Prompt], **settings: Any) -> list[list[int]]:
    """MindFormers' own `generate`, prompt by prompt."""
    return generated(make_model(folder, **settings), prompts)


def generate_and_sample(
    folder: str, prompts: Sequence[Prompt], sampling: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """The same, greedily and sampling, where the seed is the number of the prompt."""
    model = make_model(folder, **settings)
    return {"greedy": generated(model, prompts), "sampled": generated(model, prompts, sampling)}


def generated(
    model: GLMChatModel, prompts: Sequence[Prompt], sampling: Optional[dict[str, Any]] = None
) -> list[list[int]]:
    answers = []
    for seed, (prompt, count) in enumerate(prompts):
        length = len(prompt)
        found = model.generate(
            [prompt],
            max_length=length + count,
            do_sample=sampling is not None,
            eos_token_id=[model.config.vocab_size],
            seed=seed,
            **(sampling or {}),
        )
        answers.append(np.asarray(found[0])[length:].tolist())
    return answers


def talk(
    folder: str, prompts: Sequence[Prompt], users: int, late: int = 3, **settings: Any
) -> dict[str, Any]:
    """All users at once."""
    return talked(Streams(make_model(folder, users=users, **settings)), prompts, users, late)


def talk_and_sample(
    folder: str, prompts: Sequence[Prompt], users: int, sampling: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """All users at once, greedily and sampling, where the seed is the number of the prompt."""
    streams = Streams(make_model(folder, users=users, **settings))
    greedy = talked(streams, prompts, users)
    streams.order.clear()
    return {"greedy": greedy, "sampled": talked(streams, prompts, users, sampling=sampling)}


def talked(
    streams: Streams,
    prompts: Sequence[Prompt],
    users: int,
    late: int = 3,
    sampling: Optional[dict[str, Any]] = None,
) -> dict[str, Any]:
    answers = streams.together(prompts, users, late, sampling)
    return {
        "answers": [answer.told() for answer in answers],
        "order": [answers.index(answer) for answer in streams.order],
        "graphs": len(streams.model.compile_cache),
    }


def everything(
    folder: str, prompts: Sequence[Prompt], few: Sequence[Prompt], users: int, **settings: Any
) -> dict[str, Any]:
    """All that a version must be able to do, on as few models as possible."""
    streams = Streams(make_model(folder, users=users, **settings))
    alone = streams.alone(few, users)
    streams.order.clear()
    together = streams.together(prompts, users)
    order = [together.index(answer) for answer in streams.order]
    nan = survive_nan(streams, few)
    graphs = len(streams.model.compile_cache)
    fast = make_model(
        folder,
        users=users,
        is_sample_acceleration=True,
        top_k=streams.model.config.vocab_size,  # all probabilities
        **settings,
    )
    return {
        "alone": [answer.told() for answer in alone],
        "together": {
            "answers": [answer.told() for answer in together],
            "order": order,
            "graphs": graphs,
        },
        "nan": nan,
        "generated": generated(streams.model, few),
        "accelerated": [answer.told() for answer in Streams(fast).together(few, users)],
    }


def survive_nan(streams: Streams, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Fills the past of user 2 with NaN before it answers, in the middle of an answer of user 1."""
    interrupted, spoiled = Answer(prompts[0]), Answer(prompts[1])
    pieces = streams.stream(interrupted, 1)
    next(pieces)
    layers = streams.model.transformer.layers
    for layer in layers:
        cell = layer.kv_past[2]
        nan = Tensor(np.full(cell.key_past.shape, np.nan, np.float32))
        cell(nan, nan)
    planted = [share_of_nan(layer.kv_past[2]) for layer in layers]
    for _ in streams.stream(spoiled, 2):
        pass
    for _ in pieces:
        pass
    return {
        "planted": planted,
        "left": [share_of_nan(cell) for layer in layers for cell in layer.kv_past],
        "answers": [answer.told() for answer in (interrupted, spoiled)],
    }


def share_of_nan(cell: Any) -> float:
    past = np.stack((cell.key_past.asnumpy(), cell.value_past.asnumpy()))
    return float(np.isnan(past).mean())


def other_ways(
    folder: str, prompts: Sequence[Prompt], users: int, **settings: Any
) -> dict[str, Any]:
    """Models that are made otherwise than by default."""
    return {
        "graph per user": talk(folder, prompts, users, graph_per_user=True, **settings),
        "no past": generate(folder, prompts, use_past=False, **settings),
    }
