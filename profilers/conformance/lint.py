"""Rules L1..L10 for the in-graph hook, read from its source and watched while it runs.

The source is read along the hook's calls within its own package; expressions are resolved against real objects (the
backend, a captured batch, its metadata), so that "a tensor" means one. What running shows wins: a line that looks wrong
and does no harm is a note, a hook that does harm fails however it reads.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from ...backends.base import AttentionBackend, tensors_of
from ...backends.modes import Arm
from ..counters import SYNC_OPS
from ..graphs import CaptureError
from ..recorded import HOST_READS
from .findings import Note, check
from .hooks import two_traces
from .pointers import owned_by, recorded_arms, selected
from .subject import Subject, addresses
from .trace import Trace, trace

RULES = {
    "L1": "no host reads of device values",
    "L2": "no copies between host and device",
    "L3": "no shapes that depend on data",
    "L4": "no shapes or numbers from live values",
    "L5": "no memory that must outlive the graph is made in the hook",
    "L6": "no branches on what differs between capture and replay",
    "L7": "no streams, events or waits made in the hook",
    "L8": "no compiling or tuning on first use",
    "L9": "no reads of tensors that live for one step",
    "L10": "no randomness, printing or exceptions as fallbacks",
}

NOT_TENSORS = {"size", "dim", "stride", "numel", "data_ptr", "element_size", "storage_offset", "is_contiguous"}
"""Tensor methods that return host values without waiting."""

HOST_FIELDS = {"seq_lens_sum", "num_padding", "actual_forward_mode"}
"""Batch fields, beside every ``*_cpu``, that a capture has other values of than a replay."""

DATA_SHAPES = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "_unique2", "unique_dim"}
STREAMS = {"synchronize", "wait_stream", "wait_event", "record_event", "record_stream", "Stream", "Event"}
RANDOM = {"rand", "randn", "randint", "randperm", "manual_seed", "bernoulli_", "uniform_", "normal_", "random_"}

LAUNCHERS = ("attn_graph.backends.kernels.launch", "attn_graph.backends.kernels.direct")
"""How a launch is put on the stream is not the hook's business."""

UNKNOWN = object()
TENSOR = object()
"""Stands for a tensor that only exists while the hook runs."""


@dataclass(slots=True)
class Report:
    """What reading and what running say, by rule. `ran` is False where the hook could not be captured at all."""

    read: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)
    ran: bool = True


# Reading.


class _Reader(ast.NodeVisitor):
    """Walks one function and, through `calls`, those it calls. `names` maps local names to real objects."""

    def __init__(self, function: FunctionType, names: dict[str, Any], report: dict[str, list[str]]) -> None:
        self._globals, self._report = function.__globals__, report
        self._names = inspect.getclosurevars(function).nonlocals | names
        self._file = Path(inspect.getsourcefile(function) or "?").name
        self._symbol, self._first = function.__qualname__, function.__code__.co_firstlineno
        self.calls: list[tuple[FunctionType, dict[str, Any]]] = []

    def found(self, rule: str, node: ast.AST, what: str) -> None:
        line = self._first + node.lineno - 1
        self._report.setdefault(rule, []).append(f"{what} in {self._symbol} ({self._file}:{line})")

    # Resolving names to objects.

    def value(self, node: ast.AST) -> Any:
        """The object an expression stands for, TENSOR, or UNKNOWN."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, self._globals.get(node.id, UNKNOWN))
        if isinstance(node, ast.Attribute):
            base = self.value(node.value)
            if base is TENSOR:
                return TENSOR if node.attr in ("T", "mT", "data") else UNKNOWN
            try:
                return UNKNOWN if base is UNKNOWN else getattr(base, node.attr, UNKNOWN)
            except Exception:  # a proxy, of a driver say, that has nothing behind it on this machine
                return UNKNOWN
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super" and "__class__" in self._names:
            return super(self._names["__class__"], self._names["self"])
        return TENSOR if self.is_tensor(node) else UNKNOWN

    def is_tensor(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name | ast.Attribute):
            value = self.value(node)
            return value is TENSOR or isinstance(value, torch.Tensor)
        if isinstance(node, ast.Subscript):
            return self.is_tensor(node.value)
        if isinstance(node, ast.BinOp):
            return self.is_tensor(node.left) or self.is_tensor(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.is_tensor(node.operand)
        if isinstance(node, ast.Compare):
            identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            return not identity and any(self.is_tensor(x) for x in (node.left, *node.comparators))
        if isinstance(node, ast.BoolOp):
            return any(self.is_tensor(x) for x in node.values)
        if isinstance(node, ast.IfExp):
            return self.is_tensor(node.body) or self.is_tensor(node.orelse)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if self.value(node.func.value) is torch:
                return node.func.attr not in ("device", "Size", "is_tensor", "numel")
            return self.is_tensor(node.func.value) and node.func.attr not in NOT_TENSORS | HOST_READS
        return False

    # Statements.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for t, v in zip(target.elts, value.elts, strict=True):
                self._bind(t, v)
        elif isinstance(target, ast.Name):
            self._names[target.id] = self.value(value)
        elif isinstance(target, ast.Attribute) and self.is_tensor(value):
            self.found("L5", target, f"keeps a new tensor as {ast.unparse(target)}")

    def visit_Global(self, node: ast.Global) -> None:
        self.found("L5", node, f"global {', '.join(node.names)}")

    def visit_If(self, node: ast.If) -> None:
        self._branch(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branch(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._branch(node.test)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._branch(node.test)
        self.generic_visit(node)

    def _branch(self, test: ast.AST) -> None:
        if self.is_tensor(test):
            self.found("L1", test, f"branches on the tensor {ast.unparse(test)}")
        for node in ast.walk(test):
            if isinstance(node, ast.Attribute) and _is_live(node.attr):
                self.found("L6", test, f"branches on {ast.unparse(node)}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_live(node.attr):
            self.found("L4", node, f"reads {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        self.found("L10", node, "try")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self.is_tensor(node.value):
            for part in ast.walk(node.slice):
                if isinstance(part, ast.Slice) and any(b and self.is_tensor(b) for b in (part.lower, part.upper)):
                    self.found("L1", node, f"a tensor bounds the slice {ast.unparse(node)}")
                if isinstance(part, ast.Compare) and self.is_tensor(part):
                    self.found("L3", node, f"boolean index {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        text = ast.unparse(node.func)
        on_torch = text.startswith("torch.")
        method = isinstance(node.func, ast.Attribute)
        if (method and name in HOST_READS) or (
            name in ("int", "float", "bool", "range") and any(self.is_tensor(a) for a in node.args)
        ):
            self.found("L1", node, f"{name}()")
        if text in ("torch.tensor", "torch.as_tensor", "torch.from_numpy") or name == "pin_memory":
            self.found("L2", node, f"{name}()")
        if name == "to" and any(isinstance(a, ast.Constant) and a.value == "cpu" for a in node.args):
            self.found("L2", node, ".to('cpu')")
        keywords = {k.arg for k in node.keywords}
        if (
            (name in DATA_SHAPES and (on_torch or method))
            or (name == "repeat_interleave" and "output_size" not in keywords)
            or (text == "torch.where" and len(node.args) == 1)
        ):
            self.found("L3", node, f"{name}()")
        if name in STREAMS and method:
            self.found("L7", node, f"{name}()")
        if name in ("compile", "autotune") and text.split(".")[0] in ("torch", "triton"):
            self.found("L8", node, text)
        if name == "print" or (name in RANDOM and (on_torch or method)):
            self.found("L10", node, f"{name}()")
        self._follow(node)
        self.generic_visit(node)

    def _follow(self, node: ast.Call) -> None:
        called = self.value(node.func)
        bound = inspect.ismethod(called)
        function = called.__func__ if bound else called
        if not isinstance(function, FunctionType):
            return
        names: dict[str, Any] = {}
        parameters = list(inspect.signature(function).parameters)
        if bound:
            names[parameters.pop(0)] = called.__self__
        for parameter, argument in zip(parameters, node.args, strict=False):
            names[parameter] = self.value(argument)
        names |= {k.arg: self.value(k.value) for k in node.keywords if k.arg}
        self.calls.append((function, names))


def _is_live(attribute: str) -> bool:
    return attribute in HOST_FIELDS or attribute.endswith("_cpu")


def read_hook(backend: AttentionBackend, batch: Any) -> dict[str, list[str]]:
    """What the source of the in-graph hook looks like, by rule."""
    hook = backend.init_forward_metadata_in_graph.__func__
    package = type(backend).__module__.split(".")[0]
    pending = [(hook, dict(zip(inspect.signature(hook).parameters, (backend, batch), strict=False)))]
    report: dict[str, list[str]] = {}
    done: set[FunctionType] = set()
    while pending:
        function, names = pending.pop()
        elsewhere = function.__module__.split(".")[0] not in (package, "attn_graph")
        if function in done or elsewhere or function.__module__ in LAUNCHERS:
            continue
        done.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError):  # made by exec, or a lambda in the middle of an expression
            continue
        reader = _Reader(function, names, report)
        for statement in tree.body:
            for inner in getattr(statement, "body", []):
                reader.visit(inner)
        pending += reader.calls
    return report


# Running.


def watch_hook(subject: Subject, arm: Arm) -> dict[str, list[str]]:
    """What the hook does when it runs, by rule."""
    one, other = two_traces(subject, arm)
    report: dict[str, list[str]] = {}

    def saw(rule: str, names: list[str]) -> None:
        if names:
            report.setdefault(rule, []).append(", ".join(sorted(set(names))))

    saw("L1", [n for n in one.names if n == "_local_scalar_dense"] + one.host_reads)
    saw("L2", [n for n in one.names if n in ("lift_fresh", "_pin_memory")] + _host_tensors(one, subject))
    saw("L3", [n for n in one.names if n in (SYNC_OPS - {"_local_scalar_dense"}) | DATA_SHAPES] + _masks(one))
    if one.names != other.names:
        saw("L6", [f"{len(one.ops)} operations for one batch, {len(other.ops)} for another"])
    elif one.ops != other.ops:
        saw("L4", [f"{a} and {b}" for a, b in zip(one.ops, other.ops, strict=True) if a != b][:1])
    saw("L10", [n for n in one.names if n in RANDOM])
    for rule, names in _memory(subject, arm).items():
        saw(rule, names)
    return report


def _host_tensors(seen: Trace, subject: Subject) -> list[str]:
    if subject.device.type == "cpu":
        return []
    return [f"a host tensor {list(t.shape)}" for t in seen.outside if t.device.type == "cpu" and t.dim()]


def _masks(seen: Trace) -> list[str]:
    return [
        "a boolean index" for name, told in seen.ops if name == "index" and any(torch.bool in _flat(x) for x in told)
    ]


def _flat(x: Any) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _memory(subject: Subject, arm: Arm) -> dict[str, list[str]]:
    """L5: what of the backend's own memory changes with a third call. L9: what the hook reads that nobody keeps."""
    rig = subject.rig(arm, buckets=[max(subject.buckets)])
    with rig.on_stream():
        rig.load(subject.some_batch(max(subject.buckets)))
        batch = selected(rig, max(subject.buckets))
        hook = rig.backend.init_forward_metadata_in_graph
        hook(batch)
        hook(batch)
        before = addresses(owned_by(rig.backend))
        seen = trace(hook, batch)
        after = addresses(owned_by(rig.backend))
    kept = rig.inputs | tensors_of(owned_by(rig.backend))
    storages = {t.untyped_storage().data_ptr() for t in kept.values()}
    strangers = [t for t in seen.outside if t.numel() and t.untyped_storage().data_ptr() not in storages]
    return {
        "L5": [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)],
        "L9": [
            f"a tensor {list(t.shape)} that nobody keeps" for t in strangers if t.device.type == subject.device.type
        ],
    }


@lru_cache(maxsize=4)
def inspect_hook(subject: Subject, arm: Arm) -> Report:
    """Read and run the hook of one arm."""
    rig = subject.rig(arm, buckets=[max(subject.buckets)], capture=False)
    batch = rig.runner.capture_batch(max(subject.buckets))
    rig.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    report = Report(read=read_hook(rig.backend, batch))
    try:
        report.seen = watch_hook(subject, arm)
    except CaptureError:
        report.ran = False
    return report


def _rule(rule: str) -> Callable[[Subject], Iterator[str]]:
    def run(subject: Subject) -> Iterator[str]:
        for arm in recorded_arms(subject):
            report = inspect_hook(subject, arm)
            looks = report.read.get(rule, [])
            for what in report.seen.get(rule, []):
                yield f"{what}{f'; see {looks[0]}' if looks else ''} ({arm})"
            decides = rule in ONLY_READ or not report.ran
            for what in [] if rule in report.seen else looks:
                yield f"{what} ({arm})" if decides else Note(f"{what}: looks wrong, does nothing ({arm})")

    return run


ONLY_READ = {"L7", "L8", "L10"}
"""Rules that running does not settle: a wait, a tuner or a fallback may not have been reached."""

for _id, _title in RULES.items():
    check(_id, _title)(_rule(_id))
