"""Deprecated call signatures, which work for one more version."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def keyword_only_since(version: str, *old_order: str) -> Callable[[Method], Method]:
    """Accepts keyword-only arguments of a method by position, after the prompt.

    Also accepts `query`, the old name of the prompt. Both give a DeprecationWarning.

    Args:
        version: in which the arguments became keyword-only.
        old_order: of the arguments after the prompt.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if len(arguments) <= 1 and "query" not in named:
                return method(self, *arguments, **named)
            warnings.warn(
                f"since {version}, {method.__name__} takes one prompt by position, and "
                f"{', '.join(sorted(old_order))} by keyword; the old order will be an error",
                DeprecationWarning,
                stacklevel=2,
            )
            if "query" in named:
                named["prompt"] = named.pop("query")
            known = dict(zip(old_order, arguments[1:]))
            # Excess and duplicate arguments raise the usual TypeError.
            return method(self, *arguments[:1], *arguments[1 + len(known) :], **known, **named)

        return cast(Method, call)

    return decorate
