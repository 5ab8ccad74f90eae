"""OpenAI's Responses API: `/v1/responses`.

An adapter: requests become chats, and are answered as those of `/v1/chat/completions` are.

Where it differs from the original:

- Nothing is stored by default. With `store` a response is stored for its session, in memory; only
  requests of the same key that name the same session find it: `previous_response_id`, GET, DELETE.
- `model` may be left out: the first model of the server answers. `user` names a session; the
  header X-Session-Id goes first.
- More than OpenAI has: `seed`, `stop`, `top_k`, `repetition_penalty`, `cache_prompt`.
- Streamed tool calls come whole, at the end, unless they are forced or strict: before, it is not
  certain that they are calls.
- All tools but functions, `background`, `conversation`, `prompt` and `truncation` "auto" are
  rejected. Models do not reason apart from their answer: `reasoning` and such items of the input
  have no effect, nor have hints such as `text.verbosity`.
"""

from glm_multiuser.server.responses_api.routes import router as router
