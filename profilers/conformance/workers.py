"""Tasks on processes, one at a time on each, so that a process that dies takes one task with it and names it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol


class Task(Protocol):
    """What is sent to a process. `run` says what it found, and whether the process can do more: a device fault
    cannot be undone."""

    def run(self) -> tuple[Any, bool]: ...


class Died:
    """The process that did a task ended without an answer."""


def done_by(
    jobs: int, next_task: Callable[[], Task | None], *, prepare: Callable[[int], None]
) -> Iterator[tuple[Task, Any | Died]]:
    """Do tasks on `jobs` processes; yield each with its result, or with Died, as they end.

    Args:
        next_task: asked whenever a process is free; None while there is nothing to do. A result may lead to more.
        prepare: runs first in each process, with its number: 0..jobs-1. One that replaces another has the other's.
    """
    idle, running = [_Worker(prepare, number) for number in reversed(range(jobs))], {}
    try:
        while True:
            while idle and (task := next_task()) is not None:
                worker = idle.pop()
                running[worker.start(task)] = worker, task
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, task = running.pop(future)
                try:
                    result, usable = future.result()
                except BrokenProcessPool:
                    result, usable = Died(), False
                if not usable:
                    worker.close()
                    worker = _Worker(prepare, worker.number)
                idle.append(worker)
                yield task, result
        for worker in idle:
            worker.close()
    except BaseException:  # Ctrl-C above all: nobody will ask for what is still being worked on
        for process in multiprocessing.active_children():
            process.terminate()
        for worker in [*idle, *(worker for worker, _ in running.values())]:
            worker.close()
        raise


class _Worker:
    """One process, started with its first task."""

    def __init__(self, prepare: Callable[[int], None], number: int) -> None:
        self.number = number
        # spawn: a forked child could not use CUDA.
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (prepare, number))

    def start(self, task: Task) -> Future:
        return self._pool.submit(_run, task)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _begin(prepare: Callable[[int], None], number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers; their own tracebacks help nobody
    prepare(number)


def _run(task: Task) -> tuple[Any, bool]:
    return task.run()
