"""One attention step: tokens, all users' caches, and the expected output in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native.kv_layout import STORED, TILE, cache_shapes
from tests.kernels.calling import call, native, number
from tests.kernels.kv_caches import Cache
from tests.kernels.memory import placed
from tests.kernels.weights import EPSILON

TABLE_ROWS = 50
BFLOAT16_EPSILON = 2.0**-9


@dataclass(frozen=True)
class Shape:
    """Parameters shared by all tokens of a model."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    parts: int = 1
    cache: str = "float32"
    """Type of keys and values."""

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def in_bfloat16(self) -> bool:
        """Whether queries and weights are also rounded to bfloat16."""
        return self.cache == "bfloat16" and native().glm_level() in (b"avx512bf16", b"amx")


@dataclass(frozen=True)
class Token:
    """A token's user, its cache position, its visible positions, and its rotary positions."""

    user: int
    position: int
    visible: int
    angles: tuple[int, ...]


def random_cache(shape: Shape, capacity: int, filled: int, seed: int) -> Cache:
    """NaN at positions not yet written."""
    generator = np.random.default_rng(seed)
    shapes = cache_shapes(shape.cache, 1, shape.kv_heads, capacity, shape.head_dim)
    keys, values = (np.zeros(one, STORED[shape.cache]) for one in shapes)
    cache = Cache(placed(keys), placed(values))
    positions = keys.shape[2] * TILE
    rows = generator.standard_normal((2, shape.kv_heads, positions, shape.head_dim))
    cache.fill(rows[0].astype(np.float32), rows[1, :, :capacity].astype(np.float32))
    for position in range(filled, positions):
        cache.forget(position)
    return cache


@dataclass
class Step:
    """Some tokens with their rows [tokens, ...], in order."""

    shape: Shape
    tokens: list[Token]
    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    cosine: NDArray[np.float32]
    sine: NDArray[np.float32]
    partner: NDArray[np.int32]
    scale: float = 0.3

    @staticmethod
    def random(shape: Shape, tokens: list[Token], seed: int) -> Step:
        # One generator for what all steps of a model share, and one for the tokens.
        model, generator = np.random.default_rng(shape.head_dim), np.random.default_rng(seed)

        def normal(*sizes: int) -> NDArray[np.float32]:
            return generator.standard_normal(sizes).astype(np.float32)

        table = (TABLE_ROWS, shape.head_dim // shape.parts)
        angles = model.uniform(-3, 3, table)
        kv_width = shape.kv_heads * shape.head_dim
        return Step(
            shape,
            tokens,
            normal(len(tokens), shape.heads * shape.head_dim),
            normal(len(tokens), kv_width),
            normal(len(tokens), kv_width),
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            model.permutation(shape.head_dim).astype(np.int32),
        )

    def only(self, rows: list[int]) -> Step:
        return replace(
            self,
            tokens=[self.tokens[row] for row in rows],
            query=self.query[rows],
            key=self.key[rows],
            value=self.value[rows],
        )

    def arguments(self, caches: list[Cache], height: int) -> list[NDArray[Any]]:
        """Operator inputs, with padding rows after the tokens."""
        shape, behind = self.shape, height - len(self.tokens)
        rows = np.concatenate([self.query, self.key, self.value], axis=1)

        def table(values: list[Any]) -> NDArray[np.int32]:
            return np.pad(
                np.array(values, np.int32), ((0, 0), (0, behind)), constant_values=-(2**30)
            )

        settings = [shape.heads, shape.kv_heads, shape.head_dim]
        return [
            np.pad(rows, ((0, behind), (0, 0)), constant_values=np.nan),
            number(len(self.tokens)),
            table([[token.user for token in self.tokens]])[0],
            table([[t.position for t in self.tokens], [t.visible for t in self.tokens]]),
            table([[t.angles[p] for t in self.tokens] for p in range(shape.parts)]),
            self.cosine,
            self.sine,
            self.partner,
            np.array(settings, np.int32),
            number(self.scale, np.float32),
            *[array for cache in caches for array in (cache.keys, cache.values)],
        ]

    def run(self, caches: list[Cache], height: Optional[int] = None) -> NDArray[np.float32]:
        """Returns contexts [height, width]; writes into the caches."""
        height = height or len(self.tokens)
        width = self.shape.heads * self.shape.head_dim
        output = placed(np.full((height, width), np.nan, np.float32))
        arguments = self.arguments(caches, height)
        code = call(
            "attention", *[placed(each) for each in arguments[:10]], *arguments[10:], output
        )
        assert code == 0, f"refused in line {code} of attention_operator.cpp"
        return output

    def turned(self, rows: NDArray[np.float32], heads: int) -> NDArray[np.float64]:
        """Rows [tokens, heads * head_dim] after the rotary embedding, [tokens, heads, head_dim]."""
        x = rows.reshape(len(self.tokens), heads, -1).astype(np.float64)
        angles = np.array([token.angles for token in self.tokens])
        cosine = np.concatenate(list(self.cosine[angles.T]), axis=1)[:, None]
        sine = np.concatenate(list(self.sine[angles.T]), axis=1)[:, None]
        return x * cosine + x[:, :, self.partner] * sine

    def expected(self, caches: list[Cache]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Expected contexts from the caches after the step, and the tolerance."""
        shape = self.shape
        queries = self.turned(self.query, shape.heads) * np.float64(np.float32(self.scale))
        contexts, errors = np.empty(queries.shape), np.empty(queries.shape)
        for row, token in enumerate(self.tokens):
            keys, values = caches[token.user].positions(token.visible)
            keys, values = keys.repeat(shape.group, axis=0), values.repeat(shape.group, axis=0)
            scores = np.einsum("hd,hpd->hp", queries[row], keys)
            sizes = np.einsum("hd,hpd->hp", np.abs(queries[row]), np.abs(keys))
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            contexts[row] = np.einsum("hp,hpd->hd", weights, values)
            off = EPSILON * ((shape.head_dim + 16) * sizes.max(axis=1) + token.visible + 32)
            off += shape.in_bfloat16 * BFLOAT16_EPSILON * (sizes.max(axis=1) + 1)
            errors[row] = 4 * off[:, None] * np.abs(values).max(axis=1)
        width = shape.heads * shape.head_dim
        return contexts.reshape(-1, width), errors.reshape(-1, width)
