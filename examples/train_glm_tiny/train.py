"""Trains glm-tiny: a ChatGLM-6B of four layers that memorises the corpus in this folder.

The network is the library's own `GLMForPreTraining` without caches. Run `train_tokenizer.py` first.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from corpus import read_dialogues
from mindspore import Tensor
from recipe import (
    REQUIRED_ACCURACY,
    fit,
    round_to_half,
    save,
    score,
    settings_parser,
    use_cpu,
)
from samples import padded_batches, plain_samples, varied_samples
from train_tokenizer import MASK_TOKEN_ID, PAD_TOKEN_ID

from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.engine.portable_graphs import WholeSequences
from glm_multiuser.model_config import ModelConfig
from glm_multiuser.models.chatglm_6b import GLMForPreTraining
from glm_multiuser.tokenizers import ChatGLM6BTokenizer

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "ckpt" / "glm-tiny"


def published_config(tokenizer: ChatGLM6BTokenizer) -> dict[str, Any]:
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


def initialise(network: GLMForPreTraining, seed: int) -> None:
    """Xavier initialisation with smaller matrices before a residual, as in DeepNorm."""
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


def train(
    network: GLMForPreTraining,
    tokenizer: ChatGLM6BTokenizer,
    corpus: Path,
    settings: argparse.Namespace,
) -> None:
    """Trains in place and prints the loss and the accuracy on the way."""
    random = np.random.default_rng(settings.seed)
    dialogues = read_dialogues(corpus)
    plain = padded_batches(
        plain_samples(tokenizer, dialogues), settings.tokens, np.random.default_rng(0)
    )
    logits = WholeSequences(network)
    fit(
        network,
        logits,
        settings,
        lambda: padded_batches(
            varied_samples(tokenizer, dialogues, settings.varied, random), settings.tokens, random
        ),
        lambda: score(logits, plain)[0],
    )


def main() -> None:
    settings = settings_parser(__doc__.splitlines()[0], DEFAULT_FOLDER).parse_args()

    use_cpu()
    tokenizer = ChatGLM6BTokenizer.from_folder(settings.output)
    config = published_config(tokenizer)
    network = GLMForPreTraining(ModelConfig.from_dict(config), PortableBackend())
    initialise(network, settings.seed)
    train(network, tokenizer, settings.corpus, settings)

    round_to_half(network)
    dialogues = read_dialogues(settings.corpus)
    logits = WholeSequences(network)
    random = np.random.default_rng(settings.seed + 1)
    plain = plain_samples(tokenizer, dialogues)
    varied = varied_samples(tokenizer, dialogues, 1.0, random)
    accuracy, closest = score(logits, padded_batches(plain, settings.tokens, random))
    loosely, _ = score(logits, padded_batches(varied, settings.tokens, random))
    print("with the weights rounded to float16, in float32:")
    print(f"{accuracy:.1%} word for word; smallest lead of a right token {closest:.3f} logits")
    print(f"{loosely:.1%} when asked loosely and after unrelated rounds")
    if accuracy < REQUIRED_ACCURACY:
        raise SystemExit(f"not saved: below {REQUIRED_ACCURACY:.0%}")
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    save(network, config, settings.output, **ids)
    print(f"saved to {settings.output}")


if __name__ == "__main__":
    main()
