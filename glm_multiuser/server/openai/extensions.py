"""Unimplemented fields of vLLM's and llama.cpp's servers.

Clients often send every field of their settings, so each is accepted at values without effect, and
rejected otherwise. A field is listed once, for chat and completions.
"""

from __future__ import annotations

from typing import Annotated, Any

from glm_multiuser.server.bodies import Strict
from glm_multiuser.server.openai.fields import NoEffect, Only


class Extensions(Strict):
    """Their fields; `NoEffect` if one only labels, reports or tunes, or depends on another here.

    For example, `mirostat_tau` has no effect while `mirostat` is 0.
    """

    # vLLM
    allowed_token_ids: Annotated[Any, Only([])] = None
    bad_words: Annotated[Any, Only([])] = None
    cache_salt: NoEffect = None
    chat_template: Annotated[Any, Only()] = None
    chat_template_kwargs: Annotated[Any, Only({})] = None
    documents: Annotated[Any, Only([])] = None
    ec_transfer_params: Annotated[Any, Only({})] = None
    early_stopping: Annotated[Any, Only(False)] = None
    guided_decoding_backend: NoEffect = None
    guided_whitespace_pattern: NoEffect = None
    include_reasoning: Annotated[Any, Only(True)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    kv_transfer_params: Annotated[Any, Only({})] = None
    length_penalty: Annotated[Any, Only(1)] = None
    logprob_token_ids: Annotated[Any, Only([])] = None
    logits_processors: Annotated[Any, Only([])] = None
    media_io_kwargs: Annotated[Any, Only({})] = None
    mm_processor_kwargs: Annotated[Any, Only({})] = None
    priority: Annotated[Any, Only(0)] = None
    prompt_logprobs: Annotated[Any, Only()] = None
    request_id: NoEffect = None
    return_mm_kwargs: NoEffect = None
    return_prompt_text: Annotated[Any, Only(False)] = None
    return_token_offsets: Annotated[Any, Only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False)] = None
    routed_experts_prompt_start: NoEffect = None
    session_id: NoEffect = None
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    thinking_token_budget: Annotated[Any, Only()] = None
    truncate_prompt_tokens: Annotated[Any, Only()] = None
    truncation_side: NoEffect = None
    use_beam_search: Annotated[Any, Only(False)] = None
    vllm_xargs: Annotated[Any, Only({})] = None
    watermarking: Annotated[Any, Only(False)] = None

    # llama.cpp
    dry_allowed_length: NoEffect = None
    dry_base: NoEffect = None
    dry_multiplier: Annotated[Any, Only(0)] = None
    dry_penalty_last_n: NoEffect = None
    dry_sequence_breakers: NoEffect = None
    dynatemp_exponent: NoEffect = None
    dynatemp_range: Annotated[Any, Only(0)] = None
    grammar: Annotated[Any, Only("")] = None
    id_slot: Annotated[Any, Only(-1)] = None
    image_data: Annotated[Any, Only([])] = None
    json_schema: Annotated[Any, Only()] = None
    lora: Annotated[Any, Only([])] = None
    min_keep: Annotated[Any, Only(0)] = None
    mirostat: Annotated[Any, Only(0)] = None
    mirostat_eta: NoEffect = None
    mirostat_tau: NoEffect = None
    n_cache_reuse: NoEffect = None
    n_cmpl: Annotated[Any, Only(1)] = None
    n_discard: NoEffect = None
    n_indent: Annotated[Any, Only(0)] = None
    n_keep: NoEffect = None
    n_predict: Annotated[Any, Only(-1)] = None
    n_probs: Annotated[Any, Only(0)] = None
    parse_tool_calls: Annotated[Any, Only(True)] = None
    penalize_nl: NoEffect = None
    post_sampling_probs: Annotated[Any, Only(False)] = None
    reasoning_format: Annotated[Any, Only("none")] = None
    repeat_last_n: NoEffect = None
    repeat_penalty: Annotated[Any, Only(1)] = None
    response_fields: Annotated[Any, Only([])] = None
    return_progress: Annotated[Any, Only(False)] = None
    return_tokens: Annotated[Any, Only(False)] = None
    samplers: Annotated[Any, Only()] = None
    t_max_predict_ms: Annotated[Any, Only(0, -1)] = None
    tfs_z: Annotated[Any, Only(1)] = None
    thinking_forced_open: Annotated[Any, Only(False)] = None
    timings_per_token: Annotated[Any, Only(False)] = None
    top_n_sigma: Annotated[Any, Only(-1, 0)] = None
    typical_p: Annotated[Any, Only(1)] = None
    xtc_probability: Annotated[Any, Only(0)] = None
    xtc_threshold: NoEffect = None
