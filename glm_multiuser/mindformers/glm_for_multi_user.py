"""ChatGLM-6B with MindFormers' interface: one model, plain threads, one user per thread.

`MultiUserLLM` is faster and easier; this is for code that calls the model itself. Every thread
passes its own `user`; the model keeps no state of a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from numbers import Integral
from typing import Any, Callable, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.backends.cell_layout import NO_USERS, CellLayout
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.graph_shapes import prompt_lengths
from glm_multiuser.engine.portable_graphs import PaddedBatches, ReplaceCache, User, empty_block
from glm_multiuser.errors import (
    ConfigError,
    GenerationError,
    InvalidParameterError,
    PromptTooLongError,
    shown,
)
from glm_multiuser.mindspore_internals import drop_graphs
from glm_multiuser.model_config import ChatGLM6BConfig
from glm_multiuser.models.chatglm_6b import GLMForPreTraining
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.sampling import RowSampler, choose
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.token_ids import check_token_ids


class StreamChat:
    """Methods of `GLMForMultiUser` outside its graph; a mixin, to separate the two."""

    config: ChatGLM6BConfig
    layout: CellLayout

    def _incremental_infer(
        self,
        input_ids: Sequence[int],
        current_index: int,
        is_first_iteration: bool,
        user: Union[int, Tensor] = 0,
        positions: Optional[PrefixPositions] = None,
    ) -> NDArray[Any]:
        """One graph call for one user.

        Args:
            input_ids: the sequence so far, prompt and answer.
            current_index: index of its last token.
            is_first_iteration: whether to prefill everything up to `current_index`; otherwise only
                that token is computed, with the previous ones cached.
            user: owner of the KV cache. A Tensor uses one graph for all users, an int compiles one
                per user.
            positions: of the prompt, `PrefixPositions.of(prompt, config)`. Default: derived from
                `input_ids`, which is the same unless the answer contains special tokens.

        Returns:
            float32 logits [1, vocab_size] for the next token.

        Raises:
            ConfigError: the model was created without users, so it has no cache.
            InvalidParameterError: no such user, no such index, a token id out of range, or a token
                that does not follow this user's cached ones.
            PromptTooLongError: the sequence does not fit.
        """
        number = self._check_user(user)
        if not 0 <= current_index < len(input_ids):
            raise InvalidParameterError(
                f"current_index is {current_index}; input_ids has {len(input_ids)} tokens"
            )
        length, capacity = current_index + 1, self.layout.seq_length
        if length > capacity:
            raise PromptTooLongError(
                f"the sequence has {length} tokens; the caches of this model hold {capacity}"
            )
        token_ids = [*check_token_ids(input_ids[:length], self.config.vocab_size)]
        cached = self.__dict__.setdefault("cached_tokens", {})
        # Keys are added to the cache's content, so each position can be written only once.
        if not is_first_iteration and current_index != cached.get(number, 0):
            raise InvalidParameterError(
                f"current_index is {current_index}; user {number} has {cached.get(number, 0)} "
                "cached tokens, so it must be that or a first iteration"
            )
        cached.pop(number, None)  # after an error, the cache's content is unknown
        positions = positions or PrefixPositions.of(token_ids, self.config)
        run = self._take_prompt if is_first_iteration else self._take_token
        logits = DEVICE_THREAD.call(partial(self._run, run, token_ids, user, positions))
        cached[number] = length
        return logits

    def _run(self, run: Callable[..., NDArray[Any]], *arguments: Any) -> NDArray[Any]:
        try:
            return run(*arguments)
        except Exception:
            self._drop_graphs()  # MindSpore cannot run a graph again after it failed
            raise

    def _drop_graphs(self) -> None:
        model: Any = self
        self.__dict__.pop("replace_cache", None)
        drop_graphs(model)

    def _check_user(self, user: Union[int, Tensor]) -> int:
        """Returns the number of a user; raises as `_incremental_infer` does."""
        if self.layout.users == 0:
            raise ConfigError(
                "layout has 0 users; make the model with layout=CellLayout.plan(users, seq_length)"
            )
        value: object = user
        if isinstance(user, Tensor) and user.size == 1:
            value = user.asnumpy().item()
        if not isinstance(value, Integral):
            raise InvalidParameterError(
                f"user is {shown(user)}; it must be an int or a Tensor of one integer"
            )
        number = int(value)
        if not 0 <= number < self.layout.users:
            raise InvalidParameterError(
                f"user is {number}; the users of this model are 0 to {self.layout.users - 1}"
            )
        return number

    def _take_prompt(
        self, token_ids: list[int], user: Union[int, Tensor], positions: PrefixPositions
    ) -> NDArray[Any]:
        layout = self.layout
        padded = next(one for one in prompt_lengths(layout.seq_length) if one >= len(token_ids))
        logits = self._call(
            user,
            0,
            np.array(token_ids + [0] * (padded - len(token_ids))),
            positions.ids(0, padded),
            np.array([[positions.context_length, len(token_ids)]]),
        )
        for block in range(layout.blocks_for(padded), len(layout.block_lengths)):
            self._replace(user, block)
        return logits

    def _take_token(
        self, token_ids: list[int], user: Union[int, Tensor], positions: PrefixPositions
    ) -> NDArray[Any]:
        index = len(token_ids) - 1
        new = np.array(token_ids[index:])
        blocks = len(self.layout.block_lengths)
        return self._call(user, blocks, new, positions.ids(index, index + 1), np.array([index]))

    def _call(
        self, user: Union[int, Tensor], used_blocks: int, *arrays: NDArray[Any]
    ) -> NDArray[Any]:
        model: Any = self
        inputs = [Tensor(values, ms.int32) for values in arrays]
        logits: NDArray[Any] = model(*inputs, user, used_blocks)[2].asnumpy()
        return logits[:1].astype(np.float32)

    def _replace(self, user: Union[int, Tensor], block: int) -> None:
        model: Any = self
        # Not a child of this cell: that would rename its parameters.
        replace_cache = self.__dict__.setdefault("replace_cache", ReplaceCache(model))
        replace_cache(user, empty_block(model, self.layout.block_lengths[block]), block)

    def _stream_chat(
        self,
        origin_inputs: Any,
        top_k: int,
        top_p: float,
        repetition_penalty: float,
        max_length: int,
        eos_token_id: Union[int, Sequence[int]],
        streamer: Any = None,
        pad_token_id: Optional[int] = None,
        tokenizer: Any = None,
        tlock: Optional[threading.Lock] = None,
        qi: int = 0,
    ) -> Iterator[str]:
        """Streams the answer to one prompt.

        Args:
            origin_inputs: token ids of the prompt, [length] or [1, length].
            top_k: 1 is greedy.
            top_p: nucleus mass.
            repetition_penalty: 1.0 is none.
            max_length: maximum of tokens, including the prompt; limited by the caches' length.
            eos_token_id: one or several stop token ids.
            streamer: gets the token ids of the answer by `put`, and `end` even if this generator
                fails or is closed early.
            pad_token_id: accepted for compatibility; prompts are truncated to their real length.
            tokenizer: a `ChatTokenizer`, which decodes the text.
            tlock: held only during graph calls.
            qi: the user.

        Yields:
            Text as it becomes final.

        Raises:
            ConfigError: the model was created without users.
            InvalidParameterError: no tokenizer, no such user, several prompts, or a token id or a
                setting out of range.
            PromptTooLongError: the prompt leaves no room for an answer.
            GenerationError: logits that are not finite.
        """
        del pad_token_id
        with ExitStack() as stack:
            if streamer is not None:
                stack.callback(streamer.end)
            if tokenizer is None:
                raise InvalidParameterError("tokenizer is None; it is what makes text of token ids")
            self._check_user(qi)
            token_ids = [*check_token_ids(_prompt_of(origin_inputs), self.config.vocab_size)]
            if not isinstance(max_length, Integral):
                raise InvalidParameterError(
                    f"max_length is {shown(max_length)}; it must be a whole number"
                )
            stops = tuple(np.atleast_1d(eos_token_id).tolist())
            if not all(isinstance(one, int) for one in stops):
                raise InvalidParameterError(
                    f"eos_token_id is {shown(eos_token_id)}; it must be one token id or several"
                )
            prompt_length, most = len(token_ids), min(max_length, self.layout.seq_length)
            if prompt_length == 0:
                raise InvalidParameterError("origin_inputs has 0 tokens; it must have at least 1")
            if prompt_length >= most:
                raise PromptTooLongError(
                    f"the prompt has {prompt_length} tokens; with max_length {max_length} and "
                    f"caches that hold {self.layout.seq_length} it may have at most {most - 1}"
                )
            params = SamplingParams(
                temperature=0.0 if top_k == 1 else 1.0,
                top_k=top_k,
                top_p=top_p,
                repetition_penalty=repetition_penalty,
            )
            sampler = RowSampler(params, token_ids, stops, self.config.vocab_size)
            positions = PrefixPositions.of(token_ids, self.config)
            detokenizer = tokenizer.detokenizer()
            user = Tensor(qi, ms.int32)
            for length in range(prompt_length, most):
                first = length == prompt_length
                with tlock or nullcontext():
                    logits = self._incremental_infer(token_ids, length - 1, first, user, positions)
                choice = choose(logits, [sampler])[0]
                if choice is None:
                    raise GenerationError(f"the logits of user {qi} are not finite")
                if choice.token_id in stops:
                    break
                sampler.accept(choice.token_id)
                token_ids.append(choice.token_id)
                if streamer is not None:
                    streamer.put([choice.token_id])
                yield detokenizer.push([choice.token_id])
        yield detokenizer.flush()


def _prompt_of(origin_inputs: object) -> list[int]:
    """Returns the entries of a single prompt, not validated; raises InvalidParameterError for
    several."""
    must = "it must be [length] or [1, length]"
    try:
        inputs = np.asarray(origin_inputs)
    except ValueError:  # rows of different lengths
        raise InvalidParameterError(f"origin_inputs is {shown(origin_inputs)}; {must}") from None
    if inputs.shape not in ((inputs.size,), (1, inputs.size)):
        raise InvalidParameterError(f"origin_inputs has shape {inputs.shape}; {must}")
    entries: list[int] = inputs.reshape(-1).tolist()
    return entries


class GLMForMultiUser(GLMForPreTraining, StreamChat):
    """ChatGLM-6B with MindSpore's operators, for code that calls it itself.

    Args:
        config: the shape of the model.
        backend: types of the computation; default float32.
        layout: layout of the users' KV caches; default: no caches.
    """

    def __init__(
        self,
        config: ChatGLM6BConfig,
        backend: Optional[PortableBackend] = None,
        layout: CellLayout = NO_USERS,
    ) -> None:
        super().__init__(config, backend or PortableBackend())
        self.config: ChatGLM6BConfig = config
        self.set_layout(layout)

    def set_layout(self, layout: CellLayout) -> None:
        super().set_layout(layout)
        self.batches = PaddedBatches(self, layout)
        self.__dict__.pop("cached_tokens", None)
        self._drop_graphs()

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        positions: Tensor,
        user: Optional[User] = None,
        used_blocks: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes whole prompts (`used_blocks` 0), or one new token of each given user.

        Arguments and results are those of `PortableForward`.
        """
        batch = self.batches(input_ids.shape[0], position_ids, positions, user, used_blocks)
        hidden = self.hidden_states(input_ids, batch)
        hidden = self.batches.answered(hidden, positions, used_blocks)
        tokens, finite, logits = self.next_token(hidden, self.logits(hidden, batch), batch)
        return tokens, finite, logits
