"""A request with many errors is rejected for one of them, because each takes time of the event
loop: lists without a maximum length are validated up to their first invalid item, and objects have
a maximum number of fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from glm_multiuser.server.anthropic.requests import MessagesRequest
from glm_multiuser.server.bodies import problem_of
from glm_multiuser.server.kserve.infer_bodies import InferRequest
from glm_multiuser.server.kserve.repository import LoadRequest
from glm_multiuser.server.openai.requests import ChatRequest, CompletionRequest
from glm_multiuser.server.openai.tokenize import DetokenizeRequest
from glm_multiuser.server.responses_api.requests import ResponseRequest

MANY = [7.5] * 1000
FUNCTIONS = {"type": "allowed_tools", "mode": "auto", "tools": MANY}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (MessagesRequest, {"messages": [{"role": "user", "content": MANY}]}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * 1000}]}),
        (MessagesRequest, {"system": MANY}),
        (MessagesRequest, {"betas": MANY}),
        (MessagesRequest, {"context_management": {"edits": MANY}}),
        (ResponseRequest, {"input": [{"role": "user", "content": MANY}]}),
        (ResponseRequest, {"input": [{"type": "reasoning", "summary": MANY}]}),
        (ResponseRequest, {"include": MANY}),
        (ResponseRequest, {"tool_choice": FUNCTIONS}),
        (ChatRequest, {"messages": [{"role": "assistant", "content": "a", "tool_calls": MANY}]}),
        (ChatRequest, {"stop_token_ids": MANY}),
        (ChatRequest, {"guided_choice": MANY}),
        (ChatRequest, {"structured_outputs": {"choice": MANY}}),
        (ChatRequest, {"tool_choice": {"type": "allowed_tools", "allowed_tools": FUNCTIONS}}),
        (DetokenizeRequest, {"tokens": MANY}),
        (InferRequest, {"inputs": MANY}),
        (InferRequest, {"outputs": MANY}),
        (InferRequest, {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": MANY}]}),
    ],
)
def test_long_lists(model: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(fields)
    (field,) = fields
    problems = [one for one in raised.value.errors() if one["loc"][0] == field]
    assert len(problems) == 1
    assert 0 in problems[0]["loc"]


UNKNOWN = {f"unknown_{number}": 1 for number in range(257)}


@pytest.mark.parametrize(
    ("model", "fields", "place"),
    [
        (ChatRequest, UNKNOWN, ()),
        (ChatRequest, {"stream_options": UNKNOWN}, ("stream_options",)),
        (CompletionRequest, UNKNOWN, ()),
        (MessagesRequest, UNKNOWN, ()),
        (ResponseRequest, UNKNOWN, ()),
        (DetokenizeRequest, UNKNOWN, ()),
        (LoadRequest, {"parameters": UNKNOWN}, ("parameters",)),
    ],
)
def test_unknown_fields(model: type[BaseModel], fields: dict[str, Any], place: Any) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(fields)
    (problem,) = [one for one in raised.value.errors() if one["type"] != "missing"]
    field, message = problem_of(problem, place)
    assert problem["loc"] == place
    assert message == f"{field or 'body'}: An object may have at most 256 fields, not 257"


@pytest.mark.parametrize(
    ("model", "field", "value", "limit"),
    [
        (ChatRequest, "logit_bias", "x", 1024),
        (CompletionRequest, "logit_bias", "x", 1024),
        (ResponseRequest, "client_metadata", 1, 256),
        (ResponseRequest, "access_programs", 1, 256),
        (ResponseRequest, "metadata", 1, 16),
    ],
)
def test_objects_of_any_names(
    model: type[BaseModel], field: str, value: object, limit: int
) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate({field: {str(number): value for number in range(2000)}})
    (problem,) = [one for one in raised.value.errors() if one["loc"][0] == field]
    assert problem["msg"] == f"An object may have at most {limit} fields, not 2000"
