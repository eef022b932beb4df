"""One object in a process of its own: its calls have time limits, and whatever ends it leaves the caller standing.

A kernel that hangs cannot be stopped from within its process, and one that writes where it may not takes the whole
device context with it. Compilers crash too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

START_LIMIT_S = 300.0
"""For imports and the first device context, on a slow disk."""


class ChildTimeout(RuntimeError):
    """A call took longer than its limit; the process was ended."""


class ChildDied(RuntimeError):
    """The process ended during a call; says how."""


class ChildError(RuntimeError):
    """The object raised something that cannot be raised here; carries its traceback as text."""


class Child:
    """A process that holds one object and serves its methods, one call at a time.

    Args:
        target: ``module:callable`` that makes the object; imported there, not here.
        arguments: for it, picklable.
        variables: environment variables of that process, set before `target` is imported.

    Raises:
        ChildTimeout, ChildDied: it did not start.
        Exception: what making the object raised.
    """

    def __init__(self, target: str, *arguments: Any, variables: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, target, arguments, dict(variables or {})), daemon=True
        )
        self._process.start()
        theirs.close()  # so that its death reads as the end of the stream
        try:
            self._answer(START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """``object.method(*arguments)``, or what it raised.

        Raises:
            ChildTimeout: no answer within `limit_s`. The process is gone; make a new one.
            ChildDied: likewise.
        """
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise ChildDied(self._ending()) from None
        return self._answer(limit_s)

    def kill(self) -> None:
        """End the process from another thread than the caller's: a call in progress raises `ChildDied`."""
        self._process.kill()

    def close(self) -> None:
        """End the process; it has nothing to save."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, limit_s: float) -> Any:
        try:
            if not self._connection.poll(limit_s):
                self.close()
                raise ChildTimeout(f"no answer within {limit_s:g} s")
            raised, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise ChildDied(self._ending()) from None
        except BaseException:
            self.close()  # Ctrl-C among others: nobody will read the answer that may still come
            raise
        if raised:
            raise value
        return value

    def _ending(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        self.close()
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"


def _serve(connection: Connection, target: str, arguments: tuple, variables: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.dup2(2, 1)  # the caller's standard output may be a document
    os.environ.update(variables)
    warnings.simplefilter("ignore")  # compilers' advice to their own users, in the middle of our progress bar
    module, _, name = target.partition(":")
    served: list[Any] = []

    def make(*args: Any) -> None:
        served.append(getattr(import_module(module), name)(*args))

    try:
        connection.send(_outcome(make, arguments))
        while served:
            method, arguments = connection.recv()
            connection.send(_outcome(getattr(served[0], method), arguments))
    except (EOFError, OSError):  # the parent is gone
        return


def _outcome(call: Callable[..., Any], arguments: tuple) -> tuple[bool, Any]:
    """Whether it raised, and the value or the exception."""
    try:
        return False, call(*arguments)
    except Exception as error:
        return True, _portable(error)


def _portable(error: Exception) -> Exception:
    """The exception itself where it survives the journey, else its text."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = None
    if type(again) is type(error) and str(again) == str(error):
        return error
    return ChildError("".join(traceback.format_exception(error)).rstrip())
