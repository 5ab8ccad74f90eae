"""OpenAI's API: `/v1/models`, `/v1/chat/completions` and `/v1/completions`.

`/tokenize` and `/detokenize` are vLLM's, `/v1/sessions` is this server's own.

Differences from OpenAI:

- Missing fields have the checkpoint's defaults, and `max_tokens` is limited by `seq_length`: a
  larger value is not rejected; the answer ends with "length".
- `model` is optional; the default is the first model of the server.
- Text in `/v1/completions` is a question in the chat format of the model's family; token ids are
  used unchanged, and their answer is the model's raw output.
- Choice i of a prompt has the seed `seed + i`, so choice 0 equals the answer with n=1, and each of
  several prompts in a request is answered as if sent alone.
- `user` names a session, whose requests share a slot; the header X-Session-Id takes precedence.
  Several answers to one request run in any slots.
- Additional fields: `top_k`, `min_p`, `repetition_penalty`, `structured_outputs`, `min_tokens`,
  `ignore_eos`, `stop_token_ids`, `cache_prompt`, and `return_token_ids`, which adds `token_ids` to
  every choice.
- `tool_choice` "none" omits the tools from the prompt. A forced answer is one call.
- Tool calls are streamed whole at the end, unless they are forced or strict, because until then
  they may turn out to be text.
- Unimplemented fields that would change the answer are rejected unless their value has no effect;
  unknown fields are rejected, too, except in messages, where they are ignored.
- Log-probabilities cover every generated token except a final stop token, including the tokens of
  a stop string, a header or a call, whose text is not part of the content.
"""

from fastapi import APIRouter

from glm_multiuser.server.openai import chat, completions, models, sessions, tokenize

router = APIRouter(tags=["openai"])
for part in (models, chat, completions, tokenize, sessions):
    router.include_router(part.router)
