"""Trains chatglm3-tiny: a ChatGLM3 of four layers that memorises the corpus of glm-tiny.

It also calls tools. The network is the library's own `DecoderForMultiUser` without caches. Run
`train_tokenizer.py` first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor
from samples import (
    PAD_TOKEN_ID,
    padded_batches,
    plain_samples,
    plain_tool_samples,
    varied_samples,
    varied_tool_samples,
)
from shared import (
    DEFAULT_FOLDER,
    REQUIRED_ACCURACY,
    fit,
    read_dialogues,
    round_to_half,
    save,
    score,
    settings_parser,
    use_cpu,
)
from tool_calls import read_tool_dialogues

from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.checkpoint.families import model_config_of
from glm_multiuser.engine.portable_graphs import WholeSequences
from glm_multiuser.models.decoder import DecoderForMultiUser
from glm_multiuser.tokenizers import ChatGLM2Tokenizer

AGAIN_LEARNING_RATE = 1.5e-3
LAST_LEARNING_RATE = 1e-3
CALLS_AGAIN = 4
"""Repetitions of each tool dialogue per epoch of the last steps."""

VOCABULARY_MULTIPLE = 64
"""The vocabulary is padded to a multiple of it, as the published ones are."""


def published_config(tokenizer: ChatGLM2Tokenizer) -> dict[str, Any]:
    """`config.json` in the layout of the published checkpoints."""
    padded = -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return {
        "_name_or_path": "chatglm3-tiny",
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "ffn_hidden_size": 640,
        "fp32_residual_connection": False,
        "hidden_dropout": 0.0,
        "hidden_size": 256,
        "kv_channels": 64,
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "num_attention_heads": 4,
        "num_layers": 4,
        "original_rope": True,
        "padded_vocab_size": padded,
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": 8192,
        "use_cache": True,
        "torch_dtype": "float16",
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.stop_token_ids[0],
        "pad_token_id": PAD_TOKEN_ID,
    }


def initialise(network: DecoderForMultiUser, seed: int) -> None:
    """Normal initialisation with smaller matrices before a residual, as in GPT-2."""
    random = np.random.default_rng(seed)
    smaller = (2.0 * network.config.num_layers) ** -0.5
    for parameter in network.trainable_params():
        if parameter.ndim != 2:
            continue
        before_residual = ".dense.weight" in parameter.name or "4h_to_h" in parameter.name
        deviation = 0.05 * (smaller if before_residual else 1.0)
        values = random.normal(0.0, deviation, parameter.shape)
        parameter.set_data(Tensor(values.astype(np.float32)))


def train(
    network: DecoderForMultiUser, tokenizer: ChatGLM2Tokenizer, settings: argparse.Namespace
) -> None:
    """Trains in place and prints the loss and the accuracy on the way."""
    random = np.random.default_rng(settings.seed)
    dialogues, tool_dialogues = read_dialogues(settings.corpus), read_tool_dialogues()
    plain = padded_batches(
        [*plain_samples(tokenizer, dialogues), *plain_tool_samples(tokenizer, tool_dialogues)],
        settings.tokens,
        np.random.default_rng(0),
    )

    def make_epoch() -> list[Any]:
        chats = varied_samples(tokenizer, dialogues, settings.varied, random)
        calls = varied_tool_samples(tokenizer, tool_dialogues, dialogues, random)
        return padded_batches([*chats, *calls], settings.tokens, random)

    logits = WholeSequences(network)
    fit(network, logits, settings, make_epoch, lambda: score(logits, plain)[0])


def finish(
    network: DecoderForMultiUser, tokenizer: ChatGLM2Tokenizer, settings: argparse.Namespace
) -> None:
    """Trains again, mainly on samples that must be known word for word."""
    random = np.random.default_rng(settings.seed)
    dialogues, tool_dialogues = read_dialogues(settings.corpus), read_tool_dialogues()
    chats = plain_samples(tokenizer, dialogues)
    calls = plain_tool_samples(tokenizer, tool_dialogues)
    known = padded_batches(calls, settings.tokens, np.random.default_rng(0))

    def make_epoch() -> list[Any]:
        varied = varied_samples(tokenizer, dialogues, settings.varied, random)
        return padded_batches([*chats, *varied, *calls * CALLS_AGAIN], settings.tokens, random)

    logits = WholeSequences(network)
    fit(network, logits, settings, make_epoch, lambda: score(logits, known)[0])


def main() -> None:
    parser = settings_parser(__doc__.splitlines()[0], DEFAULT_FOLDER)
    parser.set_defaults(steps=2200, tokens=512, learning_rate=2.5e-3)
    parser.add_argument("--again", type=int, default=1200, help="steps after a warm restart")
    parser.add_argument("--last", type=int, default=2500, help="steps on the fixed dialogues")
    settings = parser.parse_args()

    use_cpu()
    tokenizer = ChatGLM2Tokenizer.from_folder(settings.output)
    config = published_config(tokenizer)
    model_config = model_config_of(config, Path("config.json"))
    network = DecoderForMultiUser(model_config, PortableBackend())
    initialise(network, settings.seed)
    train(network, tokenizer, settings)
    # A second cosine (Loshchilov and Hutter 2016, SGDR) learns what the first one left.
    settings.steps, settings.learning_rate = settings.again, AGAIN_LEARNING_RATE
    settings.seed += 1
    train(network, tokenizer, settings)
    settings.steps, settings.learning_rate = settings.last, LAST_LEARNING_RATE
    settings.seed += 1
    finish(network, tokenizer, settings)

    round_to_half(network)
    logits = WholeSequences(network)
    random = np.random.default_rng(settings.seed + 1)
    dialogues, tool_dialogues = read_dialogues(settings.corpus), read_tool_dialogues()
    print("with the weights rounded to float16, in float32:")
    told = {
        "word for word": plain_samples(tokenizer, dialogues),
        "with tools": plain_tool_samples(tokenizer, tool_dialogues),
        "when asked loosely and among unrelated rounds": varied_samples(
            tokenizer, dialogues, 1.0, random
        ),
        "with tools and other values": varied_tool_samples(
            tokenizer, tool_dialogues, dialogues, random
        ),
    }
    shares = []
    for what, samples in told.items():
        share, closest = score(logits, padded_batches(samples, settings.tokens, random))
        print(f"{share:.1%} {what}; smallest lead of a right token {closest:.3f} logits")
        shares.append(share)
    if min(shares[:2]) < REQUIRED_ACCURACY:
        raise SystemExit(f"not saved: below {REQUIRED_ACCURACY:.0%}")
    save(network, config, settings.output, eos_token_id=list(tokenizer.stop_token_ids))
    print(f"saved to {settings.output}")


if __name__ == "__main__":
    main()
