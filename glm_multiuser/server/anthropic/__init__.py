"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

An adapter: requests are converted to chats and served like `/v1/chat/completions`.

Differences from Anthropic's API:

- `model` is optional; the default is the first model of the server.
- `metadata.user_id` names a session, whose requests share a slot; the header X-Session-Id takes
  precedence.
- Additional fields: `seed`, `repetition_penalty`, `cache_prompt`, and `code` in errors.
- Tool calls are streamed whole at the end, unless they are forced or strict, because until then
  they may turn out to be text.
- `message_start` is sent with the first token, when the number of cached tokens is known.
- Images, documents and tools without an `input_schema` are rejected. Models here have no separate
  thinking: `thinking`, thinking blocks, and hints such as `output_config.effort` have no effect.
"""

from glm_multiuser.server.anthropic.routes import router as router
