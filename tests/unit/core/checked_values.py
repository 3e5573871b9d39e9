"""What each value of the core holds in every test that makes one: fields of their declared types, and reasons as `reasons` documents them.

mypy believes `Any`: what comes out of a dict, or through `replace`, may have any type.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache, wraps
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import elastipod_operator.core
from elastipod_operator.core.conditions.draft import ConditionDraft
from elastipod_operator.core.reasons import Reason

Fits = Callable[[Any], bool]
# Fields that people read. None in them is a value that was left out of a sentence.
TEXTS, NOTHING = ("message", "detail", "depth_reason"), re.compile(r"\bNone\b")
# What ended a job is also the reason of the condition that says so.
OUTCOMES = ("Failed", "Completed")


@cache
def checks_by_class() -> dict[type, list[tuple[str, Fits]]]:
    """Give the dataclasses of the core, each with its fields and what tells whether a value fits them."""
    core = elastipod_operator.core
    modules = [importlib.import_module(one.name) for one in pkgutil.walk_packages(core.__path__, f"{core.__name__}.")]
    return {
        kind: _checks(kind)
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    }


def _checks(kind: type[Any]) -> list[tuple[str, Fits]]:
    hints = get_type_hints(kind, localns={})  # without the names of fields, which may be those of types
    return [(field.name, fits(hints[field.name])) for field in dataclasses.fields(kind)]


def fits(hint: Any) -> Fits:
    """Give what tells whether a value has a type. The items of collections count too."""
    if hint is Any:
        return lambda _: True
    if isinstance(hint, NewType):
        return fits(hint.__supertype__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        choices = [fits(one) for one in arguments]
        return lambda value: any(choice(value) for choice in choices)
    if origin is tuple and arguments[-1] is not Ellipsis:
        parts = [fits(one) for one in arguments]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(part(one) for part, one in zip(parts, value, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        key, item = map(fits, arguments)
        return lambda value: isinstance(value, origin) and all(key(k) and item(i) for k, i in value.items())
    if origin is not None and issubclass(origin, Collection):
        each = fits(arguments[0])
        return lambda value: isinstance(value, origin) and all(map(each, value))
    if hint is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    return lambda value: isinstance(value, origin or hint)


def checked(kind: type[Any]) -> Callable[..., None]:
    """Give the constructor of a dataclass, followed by the checks of what it has made."""
    construct = kind.__init__
    checks = checks_by_class()[kind]

    @wraps(construct)
    def construct_and_check(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        wrong = {name: value for name, is_right in checks if not is_right(value := getattr(self, name))}
        assert not wrong, f"{kind.__name__} has fields of other types than it declares: {wrong}"
        assert is_documented(self), f"the reason of {self} is documented otherwise"
        unread = [name for name in TEXTS if NOTHING.search(getattr(self, name, None) or "")]
        assert not unread, f"{unread} of {self} says None to people"

    return construct_and_check


def is_documented(value: Any) -> bool:
    """Whether a condition has a reason that it may have. Others' reasons are free."""
    reason = getattr(value, "reason", None)
    if not isinstance(reason, Reason):
        return True
    if isinstance(value, ConditionDraft):
        was_running = value.type == "Running" and not value.status  # it repeats the reason of the state that followed
        return was_running or value.type in OUTCOMES or value.type in reason.where.split(", ")
    return True
