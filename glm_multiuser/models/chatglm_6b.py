"""ChatGLM-6B, with the keys and values of every user inside its layers.

It follows the published PyTorch model (`modeling_chatglm.py` of THUDM/chatglm-6b): DeepNorm
residuals on the normed input, a plain tanh-GELU MLP of four times the width, two-dimensional rotary
positions, and bidirectional attention within the context. Names are those of MindFormers.
"""

from __future__ import annotations

import math

from mindspore import Tensor, nn

from glm_multiuser.backends.protocol import AttentionShape, Backend
from glm_multiuser.mindspore_internals import alike_but_for_parameters
from glm_multiuser.model_config import ChatGLM6BConfig
from glm_multiuser.models.batch import Batch
from glm_multiuser.models.multi_user import MultiUserModel


class SelfAttention(nn.Cell):
    """The projections of the attention: queries, keys and values of all heads, and the output."""

    def __init__(self, config: ChatGLM6BConfig, alpha: float, backend: Backend) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.query_key_value = backend.linear(hidden, 3 * hidden)
        self.dense = backend.linear(hidden, hidden, factor=alpha)


class DeepNormWithGLULayer(nn.Cell):
    """One transformer layer (named as in MindFormers) and its users' keys and values.

    Args:
        number: of the layer, from 0.
    """

    @alike_but_for_parameters
    def __init__(self, config: ChatGLM6BConfig, number: int, backend: Backend) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        heads = config.num_attention_heads
        alpha = math.sqrt(2.0 * (config.deepnorm_layers or config.num_layers))
        self.input_layernorm = backend.entry_norm(size, epsilon, number)
        self.attention = SelfAttention(config, alpha, backend)
        shape = AttentionShape(heads, heads, config.head_dim, score_factor=number + 1)
        self.attend = backend.attention(shape)
        self.post_attention_layernorm = backend.layer_norm(size, epsilon)
        self.mlp = backend.mlp(size, config.inner_hidden_size, "gelu", factor=alpha)

    @property
    def kv_past(self) -> nn.CellList:
        """The cells that hold the users' keys and values."""
        return self.attend.kv_past

    def construct(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden_size]` -> the same shape."""
        hidden, batch = self.input_layernorm(hidden, batch)
        context = self.attend(self.attention.query_key_value(hidden, batch), batch)
        hidden = self.attention.dense(context, batch, hidden)
        hidden = self.post_attention_layernorm(hidden, batch)
        return self.mlp(hidden, batch, hidden)


class GLMModel(nn.Cell):
    """Embedding, layers and final norm."""

    def __init__(self, config: ChatGLM6BConfig, backend: Backend) -> None:
        super().__init__()
        vocab, hidden, count = config.vocab_size, config.hidden_size, config.num_layers
        self.word_embeddings = backend.embedding(vocab, hidden, name="embedding_table")
        layers = [DeepNormWithGLULayer(config, number, backend) for number in range(count)]
        self.layers = nn.CellList(layers)
        self.final_layernorm = backend.entry_norm(hidden, config.layernorm_epsilon, count)

    def construct(self, input_ids: Tensor, batch: Batch) -> Tensor:
        """`input_ids` int32 [rows] -> hidden states `[rows, hidden_size]`."""
        hidden = self.word_embeddings(input_ids, batch)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return self.final_layernorm(hidden, batch)[0]


class GLMForPreTraining(MultiUserModel):
    """ChatGLM-6B for many users."""

    def __init__(self, config: ChatGLM6BConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        self.transformer = GLMModel(config, backend)
        self.lm_head = backend.linear(config.hidden_size, config.vocab_size, bias=False)
        self.set_layout(self.layout)

    def layer_cells(self) -> nn.CellList:
        return self.transformer.layers

    def hidden_states(self, input_ids: Tensor, batch: Batch) -> Tensor:
        return self.transformer(input_ids, batch)

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        return self.lm_head(hidden, batch)
