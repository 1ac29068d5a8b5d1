"""Old names of arguments keep working for one version, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

REMOVED_IN = "0.3"  # the version that drops the old names

F = TypeVar("F", bound=Callable[..., Any])


def renamed_arguments(**new_names: str) -> Callable[[F], F]:
    """Accept old keyword arguments under their new names: `renamed_arguments(vs="baseline")`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def accept_old_names(*args: Any, **kwargs: Any) -> Any:
            for old, new in new_names.items():
                if old in kwargs:
                    if new in kwargs:
                        name = function.__name__
                        raise TypeError(f"{name}() got {new!r} and its old name {old!r}")
                    message = f"{old}= is now {new}=; the old name works until {REMOVED_IN}"
                    warnings.warn(message, DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return accept_old_names  # type: ignore[return-value]

    return decorate
