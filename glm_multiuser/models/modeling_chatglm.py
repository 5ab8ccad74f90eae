"""ChatGLM2-6B, ChatGLM3-6B and GLM-4, with the keys and values of every user inside their layers.

What it computes follows `modeling_chatglm.py` of THUDM/chatglm3-6b and of THUDM/glm-4-9b-chat, and
`modeling_glm.py` of transformers; the names of the weights are those of the first two.
"""

from __future__ import annotations

from typing import Any, Optional

from mindspore import Tensor, nn

from glm_multiuser.config import CausalConfig
from glm_multiuser.models.causal import CausalForMultiUser, CausalLayer
from glm_multiuser.models.kv_past import NO_USERS, CellLayout
from glm_multiuser.models.layers import Embedding, Linear, Numerics, RMSNorm, SwiGLU
from glm_multiuser.models.rotary import RotaryEmbedding


class SelfAttention(nn.Cell):
    """Queries, keys and values in one product, queries of all heads first."""

    def __init__(self, config: CausalConfig, numerics: Numerics) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.width, self.key_end = width, width + kv_width
        self.query_key_value = Linear(
            config.hidden_size, width + 2 * kv_width, numerics, config.qkv_bias
        )
        self.dense = Linear(width, config.hidden_size, numerics, has_bias=False)

    def project(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.query_key_value(normed)
        query = projected[:, : self.width].reshape(-1, self.heads, self.head_dim)
        key = projected[:, self.width : self.key_end].reshape(-1, self.kv_heads, self.head_dim)
        value = projected[:, self.key_end :].reshape(-1, self.kv_heads, self.head_dim)
        return query, key, value


class MLP(nn.Cell):
    """hidden -> gate and up, each inner -> hidden."""

    def __init__(self, config: CausalConfig, numerics: Numerics) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.inner_hidden_size
        self.dense_h_to_4h = Linear(hidden, 2 * inner, numerics, has_bias=False)
        self.dense_4h_to_h = Linear(inner, hidden, numerics, has_bias=False)
        self.activation = SwiGLU(numerics)

    def construct(self, hidden: Tensor, used: Any, residual: Tensor, factor: Any) -> Tensor:
        """What the MLP makes of `hidden`, and `factor` times `residual`."""
        inner = self.activation(self.dense_h_to_4h(hidden, used), None, used)
        return self.dense_4h_to_h(inner, used, residual, factor)


class GLMBlock(CausalLayer):
    """One transformer layer, named as in the published model."""

    def __init__(
        self,
        config: CausalConfig,
        numerics: Numerics,
        rotary: RotaryEmbedding,
        layout: CellLayout,
    ) -> None:
        width = config.num_attention_heads * config.head_dim
        columns = (0, width, width + config.num_key_value_heads * config.head_dim)
        super().__init__(config, numerics, rotary, layout, columns)
        self.self_attention = SelfAttention(config, numerics)
        self.mlp = MLP(config, numerics)

    def project(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attention.project(normed)

    def project_own(self, normed: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.self_attention.query_key_value(normed, used)
        return rows, rows, rows

    def output(self, context: Tensor, used: Any, hidden: Tensor) -> Tensor:
        return self.self_attention.dense(context, used, hidden, self.one)


class ChatGLMModel(nn.Cell):
    """Embedding, layers, final norm and output layer."""

    def __init__(
        self,
        config: CausalConfig,
        numerics: Numerics,
        rotary: RotaryEmbedding,
        layout: CellLayout,
    ) -> None:
        super().__init__()
        self.embedding = nn.Cell()
        self.embedding.word_embeddings = Embedding(config.vocab_size, config.hidden_size, numerics)
        self.encoder = nn.Cell()
        self.encoder.layers = nn.CellList(
            [GLMBlock(config, numerics, rotary, layout) for _ in range(config.num_layers)]
        )
        self.encoder.final_layernorm = RMSNorm(
            config.hidden_size, config.layernorm_epsilon, numerics
        )
        self.output_layer = Linear(config.hidden_size, config.vocab_size, numerics, has_bias=False)
        self.native = numerics.native
        if config.tied:
            self.output_layer.weight = self.embedding.word_embeddings.weight

    def construct(self, input_ids: Tensor, angles: Any, user: Any, step: Any) -> Tensor:
        used = step[2] if self.native else None
        hidden = self.embedding.word_embeddings(input_ids, used)
        for layer in self.encoder.layers:
            hidden = layer(hidden, angles, user, step)
        return self.encoder.final_layernorm(hidden, used)


class ChatGLMForMultiUser(CausalForMultiUser):
    """ChatGLM2-6B, ChatGLM3-6B or GLM-4 for many users; see `CausalForMultiUser`."""

    def __init__(
        self,
        config: CausalConfig,
        numerics: Optional[Numerics] = None,
        layout: CellLayout = NO_USERS,
    ) -> None:
        super().__init__(config, numerics, layout)
        self.transformer = ChatGLMModel(config, self.numerics, self.rotary, layout)

    def layer_cells(self) -> nn.CellList:
        return self.transformer.encoder.layers

    def linears(self) -> list[Linear]:
        layer = self.transformer.encoder.layers[0]
        return [
            layer.self_attention.query_key_value,
            layer.self_attention.dense,
            layer.mlp.dense_h_to_4h,
            layer.mlp.dense_4h_to_h,
            self.transformer.output_layer,
        ]

    def hidden_states(self, input_ids: Tensor, angles: Any, user: Any, step: Any) -> Tensor:
        return self.transformer(input_ids, angles, user, step)

    def logits(self, hidden: Tensor, used: Any = None) -> Tensor:
        return self.transformer.output_layer(hidden, used)
