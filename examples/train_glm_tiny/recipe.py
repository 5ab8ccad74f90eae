"""Training code shared by the small models, from a batch to the saved weights."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Callable

import mindspore as ms
import numpy as np
from corpus import CORPUS
from mindspore import Tensor, nn, ops
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from glm_multiuser.checkpoint import write_huggingface

REQUIRED_ACCURACY = 0.95
LONGEST_ANSWER = 160
WARMUP_STEPS = 60
EPOCHS_BETWEEN_SCORES = 5


class AnswerLoss(nn.Cell):
    """Mean cross entropy of answer tokens; prompts and padding do not count."""

    def __init__(self, logits: nn.Cell) -> None:
        super().__init__()
        self.logits = logits
        self.cross_entropy = nn.CrossEntropyLoss(reduction="none")

    def construct(self, *arrays: Tensor) -> Tensor:
        """`arrays`: what `logits` takes, then targets and weights."""
        losses = self.cross_entropy(self.logits(*arrays[:-2]), arrays[-2])
        return (losses * arrays[-1]).sum() / arrays[-1].sum()


class TrainStep(nn.Cell):
    """One step of AdamW with clipped gradients, as one graph."""

    def __init__(self, loss: AnswerLoss, optimizer: nn.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.value_and_grad = ops.value_and_grad(loss, None, optimizer.parameters)

    def construct(self, *arrays: Tensor) -> Tensor:
        value, gradients = self.value_and_grad(*arrays)
        gradients = ops.clip_by_global_norm(gradients, 1.0)
        return ops.depend(value, self.optimizer(gradients))


def tensors(batch: Any) -> tuple[Tensor, ...]:
    """The arrays of a batch in the order of its fields: targets and weights are the last two."""
    return tuple(Tensor(getattr(batch, field.name)) for field in fields(batch))


def learning_rates(peak: float, steps: int) -> list[float]:
    """Linear warm-up, then half a cosine down to a fiftieth of the peak."""
    return [
        peak
        * min(1.0, (step + 1) / WARMUP_STEPS)
        * (0.02 + 0.49 * (1.0 + math.cos(math.pi * step / steps)))
        for step in range(steps)
    ]


def settings_parser(about: str, folder: Path) -> argparse.ArgumentParser:
    """The options shared by all trainings."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--output", type=Path, default=folder)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per batch, with padding")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--varied", type=float, default=0.2, help="share of varied samples")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def fit(
    network: nn.Cell,
    logits: nn.Cell,
    settings: argparse.Namespace,
    make_epoch: Callable[[], Sequence[Any]],
    measure: Callable[[], float],
) -> None:
    """Trains in place and prints the loss and the accuracy on the way.

    Args:
        network: the network to train.
        logits: computes the logits of a batch from all its arrays but the last two.
        settings: steps and learning rate.
        make_epoch: returns the batches of the next epoch.
        measure: returns the accuracy.
    """
    optimizer = nn.AdamWeightDecay(
        network.trainable_params(),
        learning_rate=learning_rates(settings.learning_rate, settings.steps),
        beta2=0.98,
        eps=1e-8,
        weight_decay=0.01,
    )
    step = TrainStep(AnswerLoss(logits), optimizer)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    done, epoch, began = 0, 0, time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("loss", total=settings.steps)
        while done < settings.steps:
            losses = []
            for batch in make_epoch()[: settings.steps - done]:
                losses.append(float(step(*tensors(batch)).asnumpy()))
                progress.update(task, advance=1)
            done += len(losses)
            epoch += 1
            progress.update(task, description=f"loss {np.mean(losses):.4f}")
            if epoch % EPOCHS_BETWEEN_SCORES == 0:
                progress.print(
                    f"epoch {epoch}: step {done}, loss {np.mean(losses):.4f}, "
                    f"{measure():.1%} word for word, {time.perf_counter() - began:.0f} s"
                )
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes")


def score(logits: nn.Cell, batches: Sequence[Any]) -> tuple[float, float]:
    """Share of answers that greedy decoding reproduces word for word, and their smallest margin.

    Greedy decoding reproduces an answer exactly if each of its tokens is the most likely one after
    those before it, so one forward pass over prompt and answer suffices.
    The margin is the lead, in logits, of a correct token over the second best.
    """
    right, asked, closest = 0, 0, math.inf
    for batch in batches:
        values = logits(*tensors(batch)[:-2]).asnumpy()
        best_two = np.partition(values, -2, axis=-1)[:, -2:]
        leads = best_two[:, 1] - best_two[:, 0]
        hits = values.argmax(-1) == batch.targets
        # An answer is a run of weights: every sample begins with some that are 0.
        edges = np.flatnonzero(np.diff(np.pad(batch.weights > 0, 1).astype(np.int8)))
        for first, end in edges.reshape(-1, 2):
            asked += 1
            if hits[first:end].all():
                right += 1
                closest = min(closest, float(leads[first:end].min()))
    return right / asked, closest


def use_cpu() -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)


def round_to_half(network: nn.Cell) -> None:
    for parameter in network.trainable_params():
        half = parameter.asnumpy().astype(np.float16)
        parameter.set_data(Tensor(half.astype(np.float32)))


def save(network: nn.Cell, config: dict[str, Any], folder: Path, **generation: Any) -> None:
    """Writes weights as float16, `config.json` and `generation_config.json`."""
    arrays = {
        name: parameter.asnumpy().astype(np.float16)
        for name, parameter in network.parameters_and_names()
    }
    write_huggingface(folder, config, arrays)
    generation = {"do_sample": False, "max_new_tokens": LONGEST_ANSWER, **generation}
    text = json.dumps(generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
