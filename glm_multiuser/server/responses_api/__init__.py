"""OpenAI's Responses API: `/v1/responses`.

An adapter: requests are converted to chats and served like `/v1/chat/completions`.

Differences from OpenAI:

- Nothing is stored by default. With `store`, a response is kept in memory for its session, and only
  requests with the same key and session find it: `previous_response_id`, GET, DELETE.
- `model` is optional; the default is the first model of the server. `user` names a session; the
  header X-Session-Id takes precedence.
- Additional fields: `seed`, `stop`, `top_k`, `repetition_penalty`, `cache_prompt`.
- Tool calls are streamed whole at the end, unless they are forced or strict, because until then
  they may turn out to be text.
- All tools except functions, `background`, `conversation`, `prompt` and `truncation` "auto" are
  rejected. Models here have no separate reasoning: `reasoning`, reasoning items, and hints such as
  `text.verbosity` have no effect.
"""

from glm_multiuser.server.responses_api.routes import router as router
