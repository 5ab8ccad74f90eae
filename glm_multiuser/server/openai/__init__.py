"""OpenAI's API: `/v1/models`, `/v1/chat/completions` and `/v1/completions`.

`/tokenize` and `/detokenize` are vLLM's, `/v1/sessions` is this server's own.

Where it differs from the original:

- A field that is not given has the checkpoint's default, and `max_tokens` is what `seq_length`
  leaves room for. A larger `max_tokens` is not rejected; the answer ends with "length".
- `model` may be left out: the first model of the server answers.
- Text in `/v1/completions` is a question, written as this family's chat writes one; token ids are
  used as they are, and answered with the model's own words.
- Choice i of a prompt has the seed `seed + i`, so that choice 0 is the answer with n=1, and several
  prompts in one request are answered as each alone.
- `user` names a session, whose answers share a slot; the header X-Session-Id goes first. Several
  answers to one request run in any slots.
- More than OpenAI has: `top_k`, `min_p`, `repetition_penalty`, `structured_outputs`, `min_tokens`,
  `ignore_eos`, `stop_token_ids`, `cache_prompt`, and `return_token_ids`, which adds `token_ids` to
  every choice.
- A `tool_choice` of "none" leaves the tools out of the prompt. A forced answer is one call.
- Streamed tool calls come whole, at the end, unless they are forced or strict: before, it is not
  certain that they are calls.
- Fields that would change the answer and are not implemented are rejected unless their
  value changes nothing; unknown fields are rejected, too, but those of messages are ignored.
- Log-probabilities are those of every generated token but a final stop token; the tokens of a stop
  string, a header or a call are among them, although their text is not shown as content.
"""

from fastapi import APIRouter

from glm_multiuser.server.openai import chat, completions, models, sessions, tokenize

router = APIRouter(tags=["openai"])
for part in (models, chat, completions, tokenize, sessions):
    router.include_router(part.router)
