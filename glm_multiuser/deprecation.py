"""Old ways to call a method that go on working for one version, with a warning."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def keyword_only_since(version: str, *old_order: str) -> Callable[[Method], Method]:
    """Lets callers of a method still pass by position what is keyword-only after the prompt.

    `query`, the old name of the prompt, is accepted too. Both give a DeprecationWarning.

    Args:
        version: that made the arguments keyword-only.
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
            # What exceeds the old order, or is given twice, is the TypeError of any call.
            return method(self, *arguments[:1], *arguments[1 + len(known) :], **known, **named)

        return cast(Method, call)

    return decorate
