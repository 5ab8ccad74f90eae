"""The fields of a question, sent as tensors or as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Optional, Union

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from glm_multiuser.sampling_params import REPETITION_PENALTY_MAX, TEMPERATURE_MAX
from glm_multiuser.server.bodies import LongList, NotBoolean, Seed, TopP

UNSIGNED_MAX = 2**64 - 1


def none_if_empty(value: Any) -> Any:
    """Returns None, for the default, instead of an empty text."""
    return None if isinstance(value, str) and not value.strip() else value


def writable(text: str) -> str:
    """Raises ValueError for a lone surrogate, which JSON can represent but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(writable)]
Unsigned = Annotated[int, Field(ge=0, le=UNSIGNED_MAX), NotBoolean]
TextOrTemperature = Annotated[
    Optional[float],
    Field(
        ge=0,
        le=TEMPERATURE_MAX,
        description="Number or string; 0: greedy decoding; empty: default.",
    ),
    BeforeValidator(none_if_empty),
    NotBoolean,
]
TextOrTokens = Annotated[
    Optional[int],
    Field(
        ge=1,
        le=UNSIGNED_MAX,
        description="Maximum new tokens, number or string; empty: default.",
    ),
    BeforeValidator(none_if_empty),
    NotBoolean,
]


class Parameters(BaseModel):
    """The parameters of a request, besides its inputs.

    Unknown ones are ignored, as in Triton. So are `priority`, because all requests have the same
    one, and `sequence_start` and `sequence_end`, because every request contains its history.
    """

    temperature: TextOrTemperature = None
    max_tokens: TextOrTokens = None
    top_p: TopP = None
    top_k: Annotated[Optional[Unsigned], Field(description="0: off.")] = None
    repetition_penalty: Annotated[
        Optional[float], Field(gt=0, le=REPETITION_PENALTY_MAX), NotBoolean
    ] = None
    seed: Seed = None
    stop: Annotated[Union[Text, LongList[Text], None], Field(description="Stop strings.")] = None
    timeout: Annotated[
        Optional[Unsigned], Field(description="Microseconds; 0: the server's limit.")
    ] = None
    sequence_id: Annotated[
        Union[Unsigned, str, None],
        Field(description="Session whose slot to use, like header X-Session-Id; 0: any."),
    ] = None

    @property
    def session(self) -> Optional[str]:
        """The session whose slot the request uses; None for any slot."""
        return str(self.sequence_id) if self.sequence_id else None


class Fields(Parameters):
    """The inputs of one question, and its parameters."""

    prompt: Optional[Text] = None
    text_input: Annotated[Optional[Text], Field(description="Alias of `prompt`.")] = None
    history: Annotated[
        Optional[Text], Field(description='JSON: [["question", "answer"], ...]; empty: none.')
    ] = None
    max_token: TextOrTokens = None
    history_len: Annotated[
        Optional[int], Field(ge=0, description="Rounds to use; default: all."), NotBoolean
    ] = None

    def sampling(self) -> dict[str, Any]:
        """Returns arguments of `sampling_of`; `max_token` takes precedence."""
        return {
            "temperature": self.temperature,
            "max_tokens": self.max_token or self.max_tokens,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop": self.stop,
        }
