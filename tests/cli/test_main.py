"""Manners of the command line: fast answers, one line per error, exit codes that mean something."""

from __future__ import annotations

import ast
import os
import resource
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from attn_graph.cli import main
from attn_graph.cli.errors import EXPECTED, CliError, ExitCode, NotComparableError, explain

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "triton", "pandas", "matplotlib", "scipy", "numpy"}
COMMAND = typer.main.get_command(main.app)


def run_with(monkeypatch, body) -> int:
    """Exit code of a command line whose only command does `body`."""
    app = typer.Typer(cls=main.CommandGroup, add_completion=False)
    app.callback()(lambda: None)
    app.command("it")(body)
    monkeypatch.setattr(main, "app", app)
    return main.run(["it"])


def raising(error: BaseException):
    def it() -> None:
        raise error

    return it


def cpu_seconds(command: list[str]) -> float:
    """Processor time of a command: what it would take on an idle machine, which a test machine is not."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["backends"], ["backends", "--json"]])
def test_light_commands_answer_in_half_a_second(arguments):
    command = [sys.executable, "-m", "attn_graph.cli.main", *arguments]
    assert any(cpu_seconds(command) < 0.5 for _ in range(3))  # once may be a cold cache


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["backends"], ["backends", "--json"]])
def test_light_commands_import_nothing_heavy(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "attn_graph.cli.main", *arguments]
    trace = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    imported = {line.rsplit("|", 1)[1].strip() for line in trace.splitlines() if "|" in line}
    assert "typer" in imported  # else the trace was not read
    assert not imported & HEAVY


@pytest.mark.parametrize("name", sorted(COMMAND.commands))
def test_help_of_a_command_imports_nothing_heavy(name):
    code = (
        "import sys; from attn_graph.cli.main import run; code = run(sys.argv[1:]); "
        f"heavy = {HEAVY!r} & set(sys.modules); sys.exit(str(heavy) if heavy else code)"
    )
    ended = subprocess.run([sys.executable, "-c", code, name, "--help"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Usage: attn-graph " + name in ended.stdout


def test_all_commands_are_there_in_order():
    assert tuple(COMMAND.commands) == main.COMMANDS


def test_every_command_and_every_option_has_help():
    missing = [name for name, command in COMMAND.commands.items() if not command.help]
    for name, command in [("", COMMAND), *COMMAND.commands.items()]:
        missing += [f"{name} {p.name}" for p in command.params if not p.help and p.name != "help"]
    assert not missing


def test_every_command_gives_an_example():
    assert not [name for name, command in COMMAND.commands.items() if f"attn-graph {name}" not in command.help]


def test_version_is_that_of_the_installed_package(cli):
    assert cli("--version") == (0, f"attn-graph {version('attn-graph')}\n", "")


def test_unknown_command_suggests_the_nearest_and_exits_2(cli):
    code, out, err = cli("bakends")
    assert (code, out) == (2, "")
    assert "unknown command 'bakends'" in err and "Did you mean 'backends'?" in err
    assert err.count("\n") == 1


def test_unknown_option_exits_2_with_one_line_that_says_where_to_look(cli):
    code, out, err = cli("backends", "--jsn")
    assert (code, out) == (2, "")
    assert "--jsn" in err and "attn-graph backends --help" in err and err.count("\n") == 1


def test_no_command_shows_the_help_and_exits_2(cli):
    code, out, err = cli()
    assert (code, err) == (2, "") and "Usage: attn-graph" in out


def test_brackets_in_the_users_words_are_printed_as_typed(cli):
    assert "'[red]x[/blue]'" in cli("[red]x[/blue]").err


@pytest.mark.parametrize("code", ExitCode)
def test_a_command_returns_its_exit_code(monkeypatch, code):
    assert run_with(monkeypatch, lambda: code) == code


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CliError("--bs 0 is no batch size"), 2, "Error: --bs 0 is no batch size"),
        (NotComparableError("other machine"), 4, "Error: other machine"),
        (typer.BadParameter("not a number", param_hint="--bs"), 2, "Error: Invalid value for --bs: not a number"),
        (PermissionError(13, "Permission denied", "/results/x"), 2, "Error: /results/x: Permission denied"),
        (OSError(28, "No space left on device"), 2, "Error: No space left on device"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "Error: No module named 'torch'"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_an_error_the_user_can_act_on_is_one_line(monkeypatch, capsys, error, code, message):
    assert run_with(monkeypatch, raising(error)) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(message) and err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("oops"),
        ValueError("not one of ours"),
        OSError("no file, no errno"),
        ModuleNotFoundError("No module named 'attn_graph.x'", name="attn_graph.x"),
    ],
)
def test_a_bug_keeps_its_traceback_and_no_result_shares_its_exit_code(monkeypatch, capsys, error):
    assert run_with(monkeypatch, raising(error)) == ExitCode.BUG
    err = capsys.readouterr().err
    assert "Traceback" in err and type(error).__name__ in err


def test_errors_are_known_by_class_and_by_base_class():
    from attn_graph.backends.registry import UnknownName

    class Nearer(UnknownName):
        pass

    assert explain(Nearer("unknown backend 'x'")) == (ExitCode.USAGE, "unknown backend 'x'")
    assert explain(LookupError("x")) is None


def error_classes(source: str) -> list[str]:
    """Names of exception classes that a module defines, by the spelling of their bases."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = [getattr(base, "id", getattr(base, "attr", "")) for base in node.bases]
            if any(base in found or base.endswith(("Error", "Exception")) for base in bases):
                found.append(node.name)
    return found


def own_error_classes() -> list[type[Exception]]:
    paths = [path for folder in ("backends", "profilers", "tuning") for path in (ROOT / folder).rglob("*.py")]
    names = {path: error_classes(path.read_text()) for path in paths}
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return [getattr(import_module(f"attn_graph.{modules[path]}"), name) for path in paths for name in names[path]]


CAUGHT_BELOW = {"Skip", "ChildTimeout", "ChildDied", "ChildError"}
"""Exceptions that a layer raises for itself; one that reaches the command line is a bug."""


def test_every_error_class_below_the_command_line_has_an_exit_code():
    kinds = own_error_classes()
    assert len(kinds) > 5
    assert {kind.__name__ for kind in kinds if explain(kind.__new__(kind)) is None} == CAUGHT_BELOW


def test_every_name_with_an_exit_code_is_an_error_class_that_exists():
    for name in EXPECTED:
        module, _, attribute = name.rpartition(".")
        assert issubclass(getattr(import_module(module), attribute), Exception)


def test_error_classes_are_found_by_direct_and_by_indirect_base():
    assert error_classes("class A(ValueError): ...\nclass B(A): ...\nclass C(Base): ...") == ["A", "B"]


@pytest.mark.parametrize("arguments", [["backends"], ["backends", "--json"], ["--help"]])
def test_a_closed_pipe_ends_the_command_quietly(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "attn_graph.cli.main", *arguments]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (ExitCode.BROKEN_PIPE, "")


SLOW_COMMAND = """
import sys, time, typer
from attn_graph.cli import main
app = typer.Typer(cls=main.CommandGroup)
app.callback()(lambda: None)
@app.command()
def slow():
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("saved", flush=True)
        time.sleep({cleanup_s})
main.app = app
sys.argv = ["attn-graph", "slow"]
main.main()
"""


def start_slow(cleanup_s: float) -> subprocess.Popen:
    command = [sys.executable, "-c", SLOW_COMMAND.format(cleanup_s=cleanup_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saved\n"
    return process


def test_ctrl_c_unwinds_the_command_and_exits_130():
    process = start_slow(cleanup_s=0)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "Interrupted.\n")


def test_a_second_ctrl_c_ends_a_slow_cleanup_at_once():
    process = start_slow(cleanup_s=60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT  # which a shell shows as 130
