"""Trains glm-tiny: a ChatGLM-6B of four layers that knows the corpus beside this file by heart.

The network is the library's own `GLMForMultiUser` without caches. Run `train_tokenizer.py` first.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from samples import Batch, Sample, padded_batches, plain_samples, read_dialogues, varied_samples
from train_tokenizer import MASK_TOKEN_ID, PAD_TOKEN_ID

from glm_multiuser.checkpoint import write_huggingface
from glm_multiuser.config import ModelConfig
from glm_multiuser.models.modeling_glm import GLMForMultiUser
from glm_multiuser.tokenizers import ChatGLMTokenizer

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "ckpt" / "glm-tiny"

REQUIRED_ACCURACY = 0.95
LONGEST_ANSWER = 160
WARMUP_STEPS = 60


def published_config(tokenizer: ChatGLMTokenizer) -> dict[str, Any]:
    """`config.json` in the layout of the published checkpoints."""
    return {
        "_name_or_path": "glm-tiny",
        "architectures": ["ChatGLMModel"],
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 256,
        "num_layers": 4,
        "num_attention_heads": 4,
        "layernorm_epsilon": 1e-5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "mask_token_id": MASK_TOKEN_ID,
        "gmask_token_id": tokenizer.gmask_token_id,
        "pad_token_id": PAD_TOKEN_ID,
        "max_sequence_length": 2048,
        "inner_hidden_size": 1024,
        "position_encoding_2d": True,
        "use_cache": True,
        "model_type": "chatglm",
        "torch_dtype": "float16",
    }


def initialise(network: GLMForMultiUser, seed: int) -> None:
    """Xavier, with the matrices behind a residual made smaller as DeepNorm asks for."""
    random = np.random.default_rng(seed)
    gain = (8.0 * network.config.num_layers) ** -0.25
    for parameter in network.trainable_params():
        if parameter.ndim != 2:
            continue
        deviation = math.sqrt(2.0 / sum(parameter.shape))
        if ".dense" in parameter.name:
            deviation *= gain
        if "embedding_table" in parameter.name:
            deviation = 0.1
        values = random.normal(0.0, deviation, parameter.shape)
        parameter.set_data(Tensor(values.astype(np.float32)))


class Logits(nn.Cell):
    """Logits of every position of a batch of whole sequences."""

    def __init__(self, network: GLMForMultiUser) -> None:
        super().__init__()
        self.network = network

    def construct(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.network.transformer(input_ids.reshape(-1), position_ids, mask)
        return self.network.lm_head(hidden)


class AnswerLoss(nn.Cell):
    """Mean cross entropy of the answers' tokens; prompts and padding do not count."""

    def __init__(self, logits: Logits) -> None:
        super().__init__()
        self.logits = logits
        self.cross_entropy = nn.CrossEntropyLoss(reduction="none")

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        targets: Tensor,
        weights: Tensor,
    ) -> Tensor:
        losses = self.cross_entropy(self.logits(input_ids, position_ids, mask), targets)
        return (losses * weights).sum() / weights.sum()


class TrainStep(nn.Cell):
    """One step of AdamW with clipped gradients, as one graph."""

    def __init__(self, loss: AnswerLoss, optimizer: nn.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.value_and_grad = ops.value_and_grad(loss, None, optimizer.parameters)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        targets: Tensor,
        weights: Tensor,
    ) -> Tensor:
        value, gradients = self.value_and_grad(input_ids, position_ids, mask, targets, weights)
        gradients = ops.clip_by_global_norm(gradients, 1.0)
        return ops.depend(value, self.optimizer(gradients))


def tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        Tensor(batch.input_ids),
        Tensor(batch.position_ids),
        Tensor(batch.mask),
        Tensor(batch.targets),
        Tensor(batch.weights),
    )


def learning_rates(peak: float, steps: int) -> list[float]:
    """Linear warm-up, then half a cosine down to a fiftieth of the peak."""
    return [
        peak
        * min(1.0, (step + 1) / WARMUP_STEPS)
        * (0.02 + 0.49 * (1.0 + math.cos(math.pi * step / steps)))
        for step in range(steps)
    ]


def score(logits: Logits, samples: Sequence[Sample], tokens: int) -> tuple[float, float]:
    """Share of samples that greedy search answers word for word, and the closest call among them.

    Greedy search writes an answer exactly when each of its tokens is the most likely one after
    those before it. So one pass over prompt and answer tells what token by token would give.
    The closest call is the smallest lead, in logits, of a right token over the second best.
    """
    right, closest = 0, math.inf
    for batch in padded_batches(samples, tokens, np.random.default_rng(0)):
        input_ids, position_ids, mask, _, _ = tensors(batch)
        rows = batch.input_ids.shape[0]
        values = logits(input_ids, position_ids, mask).asnumpy()
        best_two = np.partition(values, -2, axis=-1)[:, -2:]
        hits = (values.argmax(-1) == batch.targets).reshape(rows, -1)
        leads = (best_two[:, 1] - best_two[:, 0]).reshape(rows, -1)
        for hit, lead, weight in zip(hits, leads, batch.weights.reshape(rows, -1) > 0):
            if weight.any() and hit[weight].all():
                right += 1
                closest = min(closest, float(lead[weight].min()))
    return right / len(samples), closest


def train(
    network: GLMForMultiUser,
    tokenizer: ChatGLMTokenizer,
    corpus: Path,
    settings: argparse.Namespace,
) -> None:
    """Trains in place and prints the loss and the accuracy on the way."""
    random = np.random.default_rng(settings.seed)
    dialogues = read_dialogues(corpus)
    plain = plain_samples(tokenizer, dialogues)
    logits = Logits(network)
    loss = AnswerLoss(logits)
    optimizer = nn.AdamWeightDecay(
        network.trainable_params(),
        learning_rate=learning_rates(settings.learning_rate, settings.steps),
        beta2=0.98,
        eps=1e-8,
        weight_decay=0.01,
    )
    step = TrainStep(loss, optimizer)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    done, epoch, began = 0, 0, time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=settings.steps)
        while done < settings.steps:
            samples = varied_samples(tokenizer, dialogues, settings.varied, random)
            batches = padded_batches(samples, settings.tokens, random)
            losses = [
                float(step(*tensors(batch)).asnumpy()) for batch in batches[: settings.steps - done]
            ]
            done += len(losses)
            epoch += 1
            progress.update(task, completed=done, description=f"loss {np.mean(losses):.4f}")
            if epoch % 10 == 0:
                accuracy, _ = score(logits, plain, settings.tokens)
                progress.print(
                    f"epoch {epoch}: step {done}, loss {np.mean(losses):.4f}, "
                    f"{accuracy:.1%} word for word, {time.perf_counter() - began:.0f} s"
                )


def round_to_half(network: GLMForMultiUser) -> None:
    for parameter in network.trainable_params():
        half = parameter.asnumpy().astype(np.float16)
        parameter.set_data(Tensor(half.astype(np.float32)))


def save(network: GLMForMultiUser, config: dict[str, Any], folder: Path) -> None:
    arrays = {
        name: parameter.asnumpy().astype(np.float16)
        for name, parameter in network.parameters_and_names()
    }
    write_huggingface(folder, config, arrays)
    generation = {
        "do_sample": False,
        "max_new_tokens": LONGEST_ANSWER,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    text = json.dumps(generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus.jsonl")
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per batch, with padding")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--varied", type=float, default=0.2, help="share of varied samples")
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    tokenizer = ChatGLMTokenizer.from_folder(settings.output)
    config = published_config(tokenizer)
    network = GLMForMultiUser(ModelConfig.from_dict(config))
    initialise(network, settings.seed)
    began = time.perf_counter()
    train(network, tokenizer, settings.corpus, settings)
    minutes = (time.perf_counter() - began) / 60

    round_to_half(network)
    dialogues = read_dialogues(settings.corpus)
    logits = Logits(network)
    random = np.random.default_rng(settings.seed + 1)
    accuracy, closest = score(logits, plain_samples(tokenizer, dialogues), settings.tokens)
    varied, _ = score(logits, varied_samples(tokenizer, dialogues, 1.0, random), settings.tokens)
    print(f"{minutes:.1f} minutes; with the weights rounded to float16, in float32:")
    print(f"{accuracy:.1%} word for word; smallest lead of a right token {closest:.3f} logits")
    print(f"{varied:.1%} when asked loosely and after unrelated rounds")
    if accuracy < REQUIRED_ACCURACY:
        raise SystemExit(f"not saved: below {REQUIRED_ACCURACY:.0%}")
    save(network, config, settings.output)
    print(f"saved to {settings.output}")


if __name__ == "__main__":
    main()
