"""Triton's interpreter without work that it throws away. Values and errors stay what they were.

A conformance run on a CPU is mostly interpreter: every addition is made a second time in 64 bits for an overflow check
that only debug builds evaluate, and every call of a device function looks through the whole of triton.language for
names to replace that the launch around it has replaced already. Without both, half the time is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import ismodule
from typing import Any


def lighten() -> None:
    """Do so in this process, for the Triton versions that are known to do the work for nothing."""
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = replace(options, sanitize_overflow=False)
    patch = getattr(interpreter, "_patch_lang", None)
    if patch and hasattr(interpreter, "_LangPatchScope") and not isinstance(patch, _OncePerLaunch):
        interpreter._patch_lang = _OncePerLaunch(patch, (interpreter.tl, interpreter.tl.core))


class _OncePerLaunch:
    """Replaces names in a language module once between the start of a launch and its end.

    Args:
        patch: replaces them for one function; returns what restores them.
        languages: modules it looks for in the function's globals.
    """

    def __init__(self, patch: Callable[[Any], Any], languages: tuple[Any, ...]) -> None:
        self._patch = patch
        self._done: set[Any] = set()
        self._seen_by = cache(
            lambda fn: frozenset(m for m in fn.__globals__.values() if ismodule(m) and m in languages)
        )

    def __call__(self, fn: Any) -> Any:
        seen = self._seen_by(fn)
        if seen and seen <= self._done:
            return None  # a device function: nobody restores after it
        scope = self._patch(fn)
        self._done |= seen
        return _Scope(scope.restore, self._done)


class _Scope:
    def __init__(self, restore: Callable[[], None], done: set[Any]) -> None:
        self._restore, self._done = restore, done

    def restore(self) -> None:
        self._restore()
        self._done.clear()
