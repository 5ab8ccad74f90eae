"""Attention over the KV cache, with MindSpore's operators."""

from __future__ import annotations

import math
from typing import Any, Optional

from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.portable.kv_cache import KVCache
from glm_multiuser.backends.portable.types import tensor_type
from glm_multiuser.backends.protocol import AttentionShape
from glm_multiuser.mindspore_internals import free_with_last_reference
from glm_multiuser.models.batch import ChunkBatch, DecodeBatch, PaddedBatch, PromptBatch, Rotary

MASKED = -60000.0
"""Added to the scores of masked positions. The published ChatGLM-6B has -10000, which large scores
of other models exceed; this is nearly the least number of float16."""


class ScaledSoftmax(nn.Cell):
    """Attention weights from scores, computed in the softmax type.

    Args:
        factor: scores are multiplied by it, because queries were divided by it; None for 1.
    """

    def __init__(self, factor: Optional[float], compute_dtype: str, softmax_dtype: str) -> None:
        super().__init__()
        self.factor = number(factor, softmax_dtype, "factor") if factor is not None else None
        self.softmax_type = tensor_type(softmax_dtype)
        self.compute_type = tensor_type(compute_dtype)
        self.softmax = ops.Softmax(axis=-1)

    def construct(self, scores: Tensor, mask: Tensor) -> Tensor:
        """`scores` [n, heads, t, positions] and `mask`, 0 or `MASKED`, broadcast to it."""
        scores = ops.cast(scores, self.softmax_type)
        if self.factor is not None:
            scores = scores * self.factor
        return ops.cast(self.softmax(scores + mask), self.compute_type)


class Attention(nn.Cell):
    """Attention of a padded batch over its users' keys and values, which this cell holds."""

    def __init__(self, shape: AttentionShape, compute_dtype: str, softmax_dtype: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.group = shape.heads // shape.kv_heads
        self.keys_end = shape.width + shape.kv_width
        self.query_scale = 1.0 / (math.sqrt(shape.head_dim) * (shape.score_factor or 1.0))
        if shape.score_factor is not None:
            self.query_scale = number(self.query_scale, compute_dtype, "query_scale")
        self.compute_dtype = compute_dtype
        self.softmax = ScaledSoftmax(shape.score_factor, compute_dtype, softmax_dtype)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()
        self.matmul = ops.MatMul()

    def set_layout(self, layout: CellLayout) -> None:
        """Allocates an empty cache for every user of `layout` and drops the old ones."""
        self.layout = layout
        shape, dtype = (self.kv_heads, self.head_dim, layout.block_lengths), self.compute_dtype
        cells = [KVCache(users, *shape, self.softmax, dtype) for users in layout.sizes]
        for cell in getattr(self, "kv_past", ()):
            free_with_last_reference(cell.blocks)
        self.kv_past = nn.CellList(cells)

    def construct(self, query_key_value: Tensor, batch: PaddedBatch) -> Tensor:
        x = query_key_value
        rotated = self.rotate(x[:, : self.keys_end], batch["rotary"])
        query, key = rotated[:, : self.heads] * self.query_scale, rotated[:, self.heads :]
        value = x[:, self.keys_end :].reshape(-1, self.kv_heads, self.head_dim)
        if "cells" in batch:
            context = self.attend_past(query, key, value, batch)
        elif "sources" in batch:
            context = self.attend_chunk(query, key, value, batch)
        else:
            context = self.attend_prompts(query, key, value, batch)
        return context

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        """`[rows, heads * head_dim]` -> `[rows, heads, head_dim]`, rotated."""
        # Partners are selected by a product with a permutation matrix, which is exact and needs no
        # strided slice.
        partner = self.matmul(x.reshape(-1, self.head_dim), rotary["partners"])
        shape = (x.shape[0], -1, self.head_dim)
        return x.reshape(shape) * rotary["cosine"] + partner.reshape(shape) * rotary["sine"]

    def attend_prompts(
        self, query: Tensor, key: Tensor, value: Tensor, batch: PromptBatch
    ) -> Tensor:
        """Whole prompts attend to themselves; their keys and values are written to the cache."""
        mask, home = batch["mask"], batch["home"]
        t = mask.shape[-1]
        query = self.queries_of(query, t)
        key, value = self.keys_of(key, t), self.keys_of(value, t)
        if home is not None:
            blocks = (self.cut(key, batch["real"]), self.cut(value, batch["real"]))
            cell = self.kv_past[home["cell"]]
            query = cell(query, blocks[0], blocks[1], home["rows"], {"block": 0})
        weights = self.softmax(self.scores(query, key), mask)
        return self.rows(self.weigh(weights, value), t)

    def attend_chunk(self, query: Tensor, key: Tensor, value: Tensor, batch: ChunkBatch) -> Tensor:
        """A chunk attends to the cached positions before it, and to itself."""
        t = query.shape[0]
        query = self.queries_of(query, t)
        key, value = self.keys_of(key, t), self.keys_of(value, t)
        home = batch["home"]
        context = self.kv_past[home["cell"]](query, key, value, home["rows"], batch)
        return self.rows(context, t)

    def attend_past(self, query: Tensor, key: Tensor, value: Tensor, batch: DecodeBatch) -> Tensor:
        """One new token of each user attends to its own past; padding rows become zeros."""
        rows, home, steps = query.shape[0], batch["home"], batch["cells"]
        query = query.reshape(rows, self.kv_heads, self.group, self.head_dim)
        if home is not None:
            count = home["rows"].shape[0]
            context = self.kv_past[home["cell"]](
                rows_between(query, 0, count),
                rows_between(key, 0, count).reshape(-1, self.head_dim),
                rows_between(value, 0, count).reshape(-1, self.head_dim),
                home["rows"],
                steps[0],
            )
        else:
            contexts: tuple[Any, ...] = ()
            first = 0
            for cell in range(len(self.kv_past)):
                last = first + self.layout.sizes[cell]
                contexts = (
                    *contexts,
                    self.kv_past[cell](
                        rows_between(query, first, last),
                        rows_between(key, first, last).reshape(-1, self.head_dim),
                        rows_between(value, first, last).reshape(-1, self.head_dim),
                        None,
                        steps[cell],
                    ),
                )
                first = last
            context = contexts[0] if len(contexts) == 1 else ops.concat(contexts, 0)
        context = context.reshape(context.shape[0], -1)
        missing = rows - context.shape[0]
        if missing > 0:
            padding = ops.zeros((missing, context.shape[1]), context.dtype)
            context = ops.concat((context, padding), 0)
        return context

    def queries_of(self, query: Tensor, t: int) -> Tensor:
        """`[n * t, heads, head_dim]` -> `[n, kv_heads, group * t, head_dim]`."""
        query = query.reshape(-1, t, self.heads, self.head_dim)
        query = ops.transpose(query, (0, 2, 1, 3))
        return query.reshape(-1, self.kv_heads, self.group * t, self.head_dim)

    def keys_of(self, key: Tensor, t: int) -> Tensor:
        """`[n * t, kv_heads, head_dim]` -> `[n, kv_heads, t, head_dim]`, for keys or values."""
        return ops.transpose(key.reshape(-1, t, self.kv_heads, self.head_dim), (0, 2, 1, 3))

    def rows(self, context: Tensor, t: int) -> Tensor:
        """`[n, kv_heads, group * t, head_dim]` -> `[n * t, heads * head_dim]`."""
        context = context.reshape(-1, self.heads, t, self.head_dim)
        return ops.transpose(context, (0, 2, 1, 3)).reshape(-1, self.heads * self.head_dim)

    def cut(self, x: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """`x` [n, kv_heads, t, head_dim] -> one tensor per cache block, zero-padded."""
        x = ops.select(real, x, ops.zeros_like(x))
        blocks: tuple[Any, ...] = ()
        first = 0
        for length in self.layout.block_lengths:
            if first < x.shape[2]:
                piece = x if x.shape[2] <= length else x[:, :, first : first + length]
                missing = length - piece.shape[2]
                if missing > 0:
                    rest = ops.zeros((x.shape[0], self.kv_heads, missing, self.head_dim), x.dtype)
                    piece = ops.concat((piece, rest), 2)
                blocks = (*blocks, piece)
            first = first + length
        return blocks


def number(value: float, dtype: str, name: str) -> Parameter:
    """A Parameter, because layers share a graph in which only Parameters may differ."""
    return Parameter(Tensor([value], tensor_type(dtype)), name=name, requires_grad=False)


def rows_between(x: Tensor, first: int, last: int) -> Tensor:
    # On CPU, even a slice of everything copies.
    return x if first == 0 and last == x.shape[0] else x[first:last]
