"""Check V1: a vendor's planner, where it is installed, against the reference that stands in for it."""

from __future__ import annotations

from collections.abc import Iterator

from ...backends.registry import COMPARED, registered
from ...backends.vendors import VENDORS, VendorMissing, vendor_function
from .findings import Note, Skip, check
from .subject import Subject

LENGTHS = ((1,), (1, 63, 64, 65, 8192, 100, 70_000), (256, 257, 511, 512), (4096,) * 33, (1,) * 200)
"""Edges of the planners' units, one long request among short ones, more rows than parts and fewer."""


@check("V1", "a vendor's planner, where it is installed, plans as the reference does")
def vendor_plans(subject: Subject) -> Iterator[str]:
    info = registered().get(subject.case.backend)
    names = [name for name, how in (info.planners if info else {}).items() if how == COMPARED]
    if not names:
        raise Skip("no vendor planner of this backend has a specified signature")
    missing = []
    for name in names:
        try:
            function = vendor_function(name)
        except VendorMissing as reason:
            missing.append(str(reason))
            continue
        for lens in LENGTHS:
            for problem in VENDORS[name].compare(function, lens, subject.device):
                yield f"{name} of {len(lens)} lengths: {problem}"
        yield Note(f"{name} compared")
    if len(missing) == len(names):
        raise Skip("; ".join(missing))
