"""Qwen2, with the keys and values of every user inside its layers.

What it computes follows `modeling_qwen2.py` of transformers, and so do the names of the weights.
"""

from __future__ import annotations

from typing import Any, Optional

from mindspore import Tensor, nn

from glm_multiuser.config import CausalConfig
from glm_multiuser.models.causal import CausalForMultiUser, CausalLayer
from glm_multiuser.models.kv_past import NO_USERS, CellLayout
from glm_multiuser.models.layers import Embedding, Linear, Numerics, RMSNorm, SwiGLU
from glm_multiuser.models.rotary import RotaryEmbedding


class Qwen2Attention(nn.Cell):
    """Queries, keys and values, each by a product of its own."""

    def __init__(self, config: CausalConfig, numerics: Numerics) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = Linear(hidden, width, numerics, config.qkv_bias)
        self.k_proj = Linear(hidden, kv_width, numerics, config.qkv_bias)
        self.v_proj = Linear(hidden, kv_width, numerics, config.qkv_bias)
        self.o_proj = Linear(width, hidden, numerics, has_bias=False)

    def project(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.q_proj(normed).reshape(-1, self.heads, self.head_dim)
        key = self.k_proj(normed).reshape(-1, self.kv_heads, self.head_dim)
        value = self.v_proj(normed).reshape(-1, self.kv_heads, self.head_dim)
        return query, key, value


class Qwen2MLP(nn.Cell):
    """hidden -> gate and up, each inner -> hidden."""

    def __init__(self, config: CausalConfig, numerics: Numerics) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.inner_hidden_size
        self.gate_proj = Linear(hidden, inner, numerics, has_bias=False)
        self.up_proj = Linear(hidden, inner, numerics, has_bias=False)
        self.down_proj = Linear(inner, hidden, numerics, has_bias=False)
        self.activation = SwiGLU(numerics)

    def construct(self, hidden: Tensor, used: Any, residual: Tensor, factor: Any) -> Tensor:
        """What the MLP makes of `hidden`, and `factor` times `residual`."""
        gate, up = self.gate_proj(hidden, used), self.up_proj(hidden, used)
        return self.down_proj(self.activation(gate, up, used), used, residual, factor)


class Qwen2DecoderLayer(CausalLayer):
    """One transformer layer, named as in the published model."""

    def __init__(
        self,
        config: CausalConfig,
        numerics: Numerics,
        rotary: RotaryEmbedding,
        layout: CellLayout,
    ) -> None:
        super().__init__(config, numerics, rotary, layout)
        self.self_attn = Qwen2Attention(config, numerics)
        self.mlp = Qwen2MLP(config, numerics)

    def project(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(normed)

    def project_own(self, normed: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.self_attn
        return (
            attention.q_proj(normed, used),
            attention.k_proj(normed, used),
            attention.v_proj(normed, used),
        )

    def output(self, context: Tensor, used: Any, hidden: Tensor) -> Tensor:
        return self.self_attn.o_proj(context, used, hidden, self.one)


class Qwen2Model(nn.Cell):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: CausalConfig,
        numerics: Numerics,
        rotary: RotaryEmbedding,
        layout: CellLayout,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, numerics)
        self.layers = nn.CellList(
            [Qwen2DecoderLayer(config, numerics, rotary, layout) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.layernorm_epsilon, numerics)
        self.native = numerics.native

    def construct(self, input_ids: Tensor, angles: Any, user: Any, step: Any) -> Tensor:
        used = step[2] if self.native else None
        hidden = self.embed_tokens(input_ids, used)
        for layer in self.layers:
            hidden = layer(hidden, angles, user, step)
        return self.norm(hidden, used)


class Qwen2ForMultiUser(CausalForMultiUser):
    """Qwen2 for many users; see `CausalForMultiUser`."""

    def __init__(
        self,
        config: CausalConfig,
        numerics: Optional[Numerics] = None,
        layout: CellLayout = NO_USERS,
    ) -> None:
        super().__init__(config, numerics, layout)
        self.model = Qwen2Model(config, self.numerics, self.rotary, layout)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, self.numerics, has_bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def layer_cells(self) -> nn.CellList:
        return self.model.layers

    def linears(self) -> list[Linear]:
        layer = self.model.layers[0]
        return [
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_proj,
            layer.mlp.down_proj,
            self.lm_head,
        ]

    def hidden_states(self, input_ids: Tensor, angles: Any, user: Any, step: Any) -> Tensor:
        return self.model(input_ids, angles, user, step)

    def logits(self, hidden: Tensor, used: Any = None) -> Tensor:
        return self.lm_head(hidden, used)
