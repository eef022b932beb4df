"""Proof that a backend's metadata survives capture and replay.

A `Subject` is one backend in one configuration. A check (`CHECKS`, by id) yields a sentence for each problem it finds;
`verify` makes the checks that apply on a matrix of subjects, and shows that known faults are caught.

Checks know no backend: the oracle says what each metadata field must hold, `tensors_of` finds the fields, and
`Allowances` says what a backend does on purpose. Its own sizes a backend refuses with ConfigError.
"""

from . import device, hooks, lint, planners, pointers, runners, values  # noqa: F401  they register their checks
from .findings import CHECKS, Check, Finding, Note, Skip, judge
from .run import verify
from .subject import Rig, Subject

__all__ = ["CHECKS", "Check", "Finding", "Note", "Rig", "Skip", "Subject", "judge", "verify"]
