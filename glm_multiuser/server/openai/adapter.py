"""Converts requests of other protocols to chats, which are served like `/v1/chat/completions`.

Error messages use the other protocol's field names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from pydantic import Field, ValidationError
from starlette.requests import Request

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.sampling_params import REPETITION_PENALTY_MAX
from glm_multiuser.server.bodies import LongList, Seed, Strict, Temperature, TopP, problem_of
from glm_multiuser.server.errors import APIError, api_error_of, bad_request
from glm_multiuser.server.openai.chat import generation_request, start_chat
from glm_multiuser.server.openai.fields import Hint
from glm_multiuser.server.openai.generation_group import GenerationGroup
from glm_multiuser.server.openai.requests import ChatRequest
from glm_multiuser.server.request_context import service_of

CALL_ID, CALLS = "tool_call_id", "tool_calls"
MESSAGE = re.compile(r"messages(?:\[(\d+)\]|\.(\d+))")
KEEPS_ALL = "would drop content; here a prompt that is too long is rejected"
RUNS_NO_TOOL = (
    "is not possible: this server runs no tools, and has none but those that a request describes "
    "with a schema"
)


class CommonFields(Strict):
    """Fields that other protocols share with chats; some are extensions of this server."""

    stream: Optional[bool] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: Optional[int] = Field(None, ge=0, description="0: off.")
    repetition_penalty: Optional[float] = Field(
        None, gt=0, le=REPETITION_PENALTY_MAX, description="1: off."
    )
    seed: Seed = None
    cache_prompt: Optional[bool] = Field(
        None, description="false: bypass the session's prefix cache."
    )

    service_tier: Hint[str] = None

    def chat_fields(self, *same: str) -> dict[str, Any]:
        """Returns the chat's fields.

        Args:
            same: further fields that are the same in this protocol and in chats.
        """
        return self.model_dump(include={*CommonFields.model_fields, *same})


class DescribedTool(Strict):
    """Fields that tools of other protocols share with those of chats.

    `type` comes first, so that a tool of another type gets an error about its type.
    """

    type: Any = None
    name: str
    description: Optional[str] = None
    strict: Optional[bool] = None

    allowed_callers: Hint[LongList[str]] = None
    defer_loading: Hint[bool] = None


def chat_tool(tool: DescribedTool, parameters: Optional[dict[str, Any]]) -> dict[str, Any]:
    """Returns a tool in the chat format."""
    named = {"name": tool.name, "description": tool.description}
    function = {**named, "parameters": parameters, "strict": tool.strict}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Chat:
    """A request converted to a chat.

    Attributes:
        fields: of `ChatRequest`; None counts as missing.
        names: maps fields to their names in the other protocol, if these differ.
        places: the location of each message in the other protocol's request.
    """

    fields: Mapping[str, Any]
    names: Mapping[str, str]
    places: Sequence[str]

    async def start(self, request: Request) -> GenerationGroup:
        """Submits the chat.

        Raises:
            APIError: an invalid field, or as `Service.start`.
        """
        try:
            return await start_chat(request, self._body(), ("", ""))
        except APIError as error:
            raise self._renamed(error) from error

    async def count_tokens(self, request: Request) -> int:
        """Returns the number of prompt tokens.

        Raises:
            APIError: an invalid field, or a model that is unknown or not ready.
        """
        service = service_of(request)
        try:
            wanted = generation_request(self._body())
            model = service.models.get(self.fields["model"])
            return len(await service.token_ids(model, wanted))
        except (APIError, GLMMultiUserError) as error:
            raise self._renamed(api_error_of(error)) from error

    def _body(self) -> ChatRequest:
        given = {name: value for name, value in self.fields.items() if value is not None}
        try:
            return ChatRequest.model_validate(given)
        except ValidationError as error:
            problem = error.errors()[0]
            field, message = problem_of(problem, problem["loc"])
            raise bad_request(message, field) from error

    def _renamed(self, error: APIError) -> APIError:
        if error.field is None:
            return error
        message = self._rename(str(error))
        place = self._place(str(error)) if error.field == "messages" else None
        field = self._rename(error.field) if place is None else re.split(r"\W", place)[0]
        return APIError(error.status, error.code, message, field, error.retry_after)

    def _place(self, text: str) -> Optional[str]:
        """Returns the location of the message that the text begins with, in the other protocol."""
        message = MESSAGE.match(text)
        number = int(message[1] or message[2]) if message is not None else len(self.places)
        return self.places[number] if number < len(self.places) else None

    def _rename(self, text: str) -> str:
        """Replaces the field that the text begins with by the other protocol's name, and after a
        place the names of calls and of their ids. Other words may be the client's own."""
        place = self._place(text)
        if place is not None:
            text = MESSAGE.sub(lambda _: place, text, count=1)
            text = text.replace(f" has {CALLS};", f" has a {self.names[CALLS]};", 1)
            return text.replace(f" has {CALL_ID} ", f" has {self.names[CALL_ID]} ", 1)
        first = re.match(rf"({'|'.join(self.names)})\b", text)
        return text if first is None else self.names[first[1]] + text[first.end() :]
