"""Every causal family, described by its `CausalConfig`.

A layer is `norm -> attention -> output -> MLP`; where residuals and norms are depends on the
family. Parameters are named as in ChatGLM2 (modeling_chatglm.py of THUDM/chatglm2-6b). Queries,
keys and values are one matrix, and so are gate and up, however a checkpoint stores them, so that
inputs are read once.
"""

from __future__ import annotations

from mindspore import Tensor, nn

from glm_multiuser.backends.protocol import AttentionShape, Backend
from glm_multiuser.mindspore_internals import alike_but_for_parameters
from glm_multiuser.model_config import CausalConfig
from glm_multiuser.models.batch import Batch
from glm_multiuser.models.multi_user import MultiUserModel


class SelfAttention(nn.Cell):
    """The projections of the attention: queries, keys and values of all heads, and the output."""

    def __init__(self, config: CausalConfig, shape: AttentionShape, backend: Backend) -> None:
        super().__init__()
        rows = shape.width + 2 * shape.kv_width
        self.query_key_value = backend.linear(config.hidden_size, rows, config.qkv_bias)
        self.dense = backend.linear(shape.width, config.hidden_size, config.dense_bias)
        self.has_norm = config.query_key_norm
        if self.has_norm:
            self.query_key_norm = backend.query_key_norm(shape, config.layernorm_epsilon)

    def construct(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden_size]` -> queries, keys and values `[rows, width + 2 * kv_width]`."""
        query_key_value = self.query_key_value(hidden, batch)
        if self.has_norm:
            query_key_value = self.query_key_norm(query_key_value, batch)
        return query_key_value


class DecoderLayer(nn.Cell):
    """One transformer layer, and its users' keys and values (`attend.kv_past`)."""

    @alike_but_for_parameters
    def __init__(self, config: CausalConfig, backend: Backend) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        shape = AttentionShape(heads, kv_heads, config.head_dim)
        norm = backend.rms_norm if config.norm == "rms" else backend.layer_norm
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        self.norm_before = config.norm_position in ("before", "both")
        self.norm_after = config.norm_position in ("after", "both")
        if self.norm_before:
            self.input_layernorm = norm(size, epsilon)
            self.post_attention_layernorm = norm(size, epsilon)
        if self.norm_after:
            self.post_self_attn_layernorm = norm(size, epsilon)
            self.post_mlp_layernorm = norm(size, epsilon)
        self.self_attention = SelfAttention(config, shape, backend)
        self.attend = backend.attention(shape)
        self.mlp = backend.mlp(size, config.inner_hidden_size, "swiglu", config.mlp_bias)

    def construct(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden_size]` -> the same shape."""
        x = self.input_layernorm(hidden, batch) if self.norm_before else hidden
        context = self.attend(self.self_attention(x, batch), batch)
        if self.norm_after:
            x = self.self_attention.dense(context, batch)
            hidden = self.post_self_attn_layernorm(x, batch, hidden)
        else:
            hidden = self.self_attention.dense(context, batch, hidden)
        x = self.post_attention_layernorm(hidden, batch) if self.norm_before else hidden
        if self.norm_after:
            return self.post_mlp_layernorm(self.mlp(x, batch), batch, hidden)
        return self.mlp(x, batch, hidden)


class Transformer(nn.Cell):
    """Embedding, layers, final norm and output layer."""

    def __init__(self, config: CausalConfig, backend: Backend) -> None:
        super().__init__()
        vocab, hidden = config.vocab_size, config.hidden_size
        norm = backend.rms_norm if config.norm == "rms" else backend.layer_norm
        self.embedding = nn.Cell()
        self.embedding.word_embeddings = backend.embedding(vocab, hidden)
        self.encoder = nn.Cell()
        layers = [DecoderLayer(config, backend) for _ in range(config.num_layers)]
        self.encoder.layers = nn.CellList(layers)
        self.encoder.final_layernorm = norm(hidden, config.layernorm_epsilon)
        self.output_layer = backend.linear(hidden, vocab, bias=False)
        if config.tied:
            self.output_layer.weight = self.embedding.word_embeddings.weight

    def construct(self, input_ids: Tensor, batch: Batch) -> Tensor:
        """`input_ids` int32 [rows] -> hidden states `[rows, hidden_size]`."""
        hidden = self.embedding.word_embeddings(input_ids, batch)
        for layer in self.encoder.layers:
            hidden = layer(hidden, batch)
        return self.encoder.final_layernorm(hidden, batch)


class DecoderForMultiUser(MultiUserModel):
    """A causal model for many users."""

    def __init__(self, config: CausalConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        self.transformer = Transformer(config, backend)
        self.set_layout(self.layout)

    def layer_cells(self) -> nn.CellList:
        return self.transformer.encoder.layers

    def hidden_states(self, input_ids: Tensor, batch: Batch) -> Tensor:
        return self.transformer(input_ids, batch)

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        return self.transformer.output_layer(hidden, batch)
