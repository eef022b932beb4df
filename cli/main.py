"""The `attn-graph` command line: names the commands, and is the one place that prints errors and picks exit codes.

Imports neither torch nor pandas: `--help`, `--version` and `backends` answer before those would have loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup

from ..backends.registry import unknown_message
from .caches import redirect_unwritable_caches
from .errors import ExitCode, explain

COMMANDS = ("bench", "compare", "tune", "verify", "perf", "report", "backends", "env")
"""Each is a module of this package that holds a function of its own name."""

# Newer typers carry a private copy of click, so click's own classes would not match there.
UsageError = typer.BadParameter.__base__
ClickException = UsageError.__base__


class CommandGroup(TyperGroup):
    """Commands in the order of COMMANDS; an unknown one is answered with the nearest."""

    def resolve_command(self, ctx, args):
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(unknown_message("command", args[0], list(self.commands)))
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attn-graph {version('attn-graph')}")
        raise typer.Exit


app = typer.Typer(cls=CommandGroup, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def attn_graph(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> ExitCode | None:
    """Measure, prove and tune the rebuild of attention metadata before graph replay.

    Start with 'attn-graph bench': a two-minute tour on whatever device there is.

    Exit codes: 0 nothing found wrong, 1 something found wrong, 2 usage or
    environment, 3 undecided, 4 not comparable, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)
    caches = redirect_unwritable_caches()
    if caches is not None:
        typer.echo(f"Note: the home directory cannot be written; caches go to {caches}", err=True)


for _name in COMMANDS:
    app.command(_name)(getattr(import_module(f".{_name}", __package__), _name))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Prints what went wrong on stderr."""
    try:
        with typer.main.get_command(app).make_context("attn-graph", list(arguments)) as context:
            code = context.command.invoke(context)
        sys.stdout.flush()
        return ExitCode.OK if code is None else code
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _complain("Interrupted.", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return _leave_pipe()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich answers a closed pipe with SystemExit(1)
            return _leave_pipe()
        raise
    except ClickException as error:
        return _complain(f"Error: {error.format_message()}{_help_hint(error)}", ExitCode.USAGE)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            traceback.print_exc()
            return _complain(
                "Error: this is a bug in attn-graph. Please report it with the lines above and the output of "
                "'attn-graph env --json'.",
                ExitCode.BUG,
            )
        code, message = explained
        return _complain(f"Error: {message}", code)


def _leave_pipe() -> ExitCode:
    """The reader has what it wanted. Python flushes stdout once more at exit and must not find the pipe there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.BROKEN_PIPE


def _help_hint(error: ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f" See '{context.command_path} --help'." if context else ""


def _complain(message: str, code: ExitCode) -> ExitCode:
    # No rich here: it would read brackets in the user's own words as markup, and break lines at 80 columns.
    typer.echo(message, err=True)
    return code


def _interrupt_once(signum: int, frame: object) -> NoReturn:
    """First Ctrl-C unwinds, so that a run can save what it measured; the next one ends the process at once."""
    signal.signal(signum, signal.SIG_DFL)
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Console entry point."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
