"""Declarative settings: dataclass fields with a default, a help text and limits.

Function signatures, command-line options and configuration files are derived from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from inspect import Parameter, cleandoc, signature
from typing import Any, Callable, NamedTuple, TypeVar, get_args, get_type_hints

from glm_multiuser.errors import ConfigError, shown

Function = TypeVar("Function", bound=Callable[..., Any])


def setting(
    default: Any,
    help: str,
    *,
    low: Any = None,
    high: Any = None,
    above: Any = None,
    choices: Sequence[str] = (),
    option: str = "",
) -> Any:
    """Declares a field of a settings dataclass, which calls `check` in `__post_init__`.

    Args:
        default: None makes None a valid value.
        help: one phrase, without a full stop.
        low, high: inclusive limits of a number; `high` may be the name of another field.
        above: exclusive lower limit of a number.
        choices: allowed values of a text.
        option: on the command line; default: the name of the field.
    """
    limits = {"low": low, "high": high, "above": above, "choices": choices}
    return field(default=default, metadata={"help": help, "option": option, **limits})


class Setting(NamedTuple):
    """A field declared with `setting`; `kind` is its type without Optional."""

    name: str
    type: Any
    kind: Any
    default: Any
    help: str
    option: str
    low: Any
    high: Any
    above: Any
    choices: Sequence[str]

    @property
    def limits(self) -> str:
        """Describes the allowed values; "" if there are no limits."""
        if len(self.choices) == 2:
            return " or ".join(map(repr, self.choices))
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "True or False"
        if self.high is not None:
            return f"between {self.low} and {self.high}"
        if self.above is not None:
            return f"more than {self.above}"
        return "" if self.low is None else f"at least {self.low}"

    @property
    def text(self) -> str:
        """Help and limits, for people."""
        limits = "" if self.kind is bool else self.limits
        return f"{self.help} ({limits})." if limits else f"{self.help}."

    def allows(self, value: Any) -> bool:
        """Whether a value has the right type and is within the limits."""
        if value is None and self.default is None:
            return True
        if self.choices:
            return value in self.choices
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if self.kind not in (int, float):
            return True
        return (
            isinstance(value, (int, self.kind))
            and (self.low is None or self.low <= value)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def settings_of(declared: type) -> list[Setting]:
    """Returns the settings of a dataclass, in order."""
    found = []
    for one in fields(declared):
        if "help" in one.metadata:
            kind = get_type_hints(declared)[one.name]
            inner = next(iter(get_args(kind)), kind)
            found.append(Setting(one.name, kind, inner, one.default, **one.metadata))
    return found


def check(values: object) -> None:
    """Checks every setting of a dataclass.

    Raises:
        ConfigError: a setting is out of its limits.
    """
    for one in settings_of(type(values)):
        value = getattr(values, one.name)
        if isinstance(one.high, str):
            one = one._replace(high=getattr(values, one.high))
        if not one.allows(value):
            limits = one.limits or f"of type {one.kind.__name__}"
            raise ConfigError(f"{one.name} is {shown(value)}; it must be {limits}")


def pick(declared: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the settings of a dataclass from `values`; converts lists to tuples."""
    found = {one.name: values[one.name] for one in settings_of(declared) if one.name in values}
    return {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}


def takes(declared: type) -> Callable[[Function], Function]:
    """Adds settings to the signature and docstring of a function that takes them as `**arguments`,
    or also by position, if it has `*arguments`."""

    def show(function: Function) -> Function:
        found = settings_of(declared)
        own = signature(function).parameters.values()
        by_position = any(one.kind is one.VAR_POSITIONAL for one in own)
        kind = Parameter.POSITIONAL_OR_KEYWORD if by_position else Parameter.KEYWORD_ONLY
        add_parameters(
            function,
            [Parameter(one.name, kind, default=one.default, annotation=one.type) for one in found],
        )
        lines = "".join(f"\n    {one.name}: {one.text}" for one in found)
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\nSettings:{lines}"
        return function

    return show


def add_parameters(function: Callable[..., Any], added: Sequence[Parameter]) -> None:
    """Replaces the variable arguments in a function's signature by `added`."""
    old = signature(function)
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    own = [one for one in old.parameters.values() if one.kind not in variable]
    parameters = sorted([*own, *added], key=lambda one: one.kind)
    function.__signature__ = old.replace(parameters=parameters)  # type: ignore[attr-defined]
