"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

An adapter: requests become chats, and are answered as those of `/v1/chat/completions` are.

Where it differs from the original:

- `model` may be left out: the first model of the server answers.
- `metadata.user_id` names a session, whose answers share a slot; the header X-Session-Id goes
  first.
- More than Anthropic has: `seed`, `repetition_penalty`, `cache_prompt`, and `code` in errors.
- Streamed tool calls come whole, at the end, unless they are forced or strict: before, it is not
  certain that they are calls.
- `message_start` comes with the first token: then it is known how much of the prompt was cached.
- Images, documents and all tools without an `input_schema` are rejected. Models do not think apart
  from their answer: `thinking`, such blocks, and hints such as `output_config.effort` have no
  effect.
"""

from glm_multiuser.server.anthropic.routes import router as router
