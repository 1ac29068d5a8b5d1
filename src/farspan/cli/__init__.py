"""The `farspan` command: one module per command, with its arguments and its output.

Heavy libraries (torch, transformers, matplotlib) are imported when a command runs, so that
`farspan --help` answers at once.
"""

from __future__ import annotations

import io
import logging
import signal
import sys
import warnings
from typing import Annotated

import typer

from farspan import __version__
from farspan.cli import lab
from farspan.cli.check import check_command
from farspan.cli.choices import epilog
from farspan.cli.compare import compare_command
from farspan.cli.console import NOTE_HANDLER, console, print_error
from farspan.cli.demo import demo_command
from farspan.cli.diagnose import diagnose_command
from farspan.cli.eval import eval_command
from farspan.cli.export import export_command
from farspan.cli.extend import extend_command
from farspan.cli.generate import generate_command
from farspan.cli.inspect import inspect_command
from farspan.cli.options import Command
from farspan.cli.pretrain import pretrain_command
from farspan.cli.report import report_command
from farspan.cli.reproduce import reproduce_command
from farspan.errors import FarspanError
from farspan.files import describe_system_error, system_error
from farspan.signals import exit_on_sigterm

app = typer.Typer(
    name="farspan",
    help="Extend the context of causal language models, and measure how far they generalize.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect", cls=Command, epilog=epilog("inspect"))(inspect_command)
app.command("diagnose", cls=Command, epilog=epilog("diagnose"))(diagnose_command)
app.command("extend", cls=Command, epilog=epilog("extend"))(extend_command)
app.command("eval", cls=Command, epilog=epilog("eval"))(eval_command)
app.command("export", cls=Command, epilog=epilog("export"))(export_command)
app.command("check", cls=Command, epilog=epilog("check"))(check_command)
app.command("generate", cls=Command, epilog=epilog("generate"))(generate_command)
app.command("pretrain", cls=Command, epilog=epilog("pretrain"))(pretrain_command)
app.command("reproduce", cls=Command, epilog=epilog("reproduce"))(reproduce_command)
app.add_typer(lab.app, name="lab")
app.command("compare", cls=Command, epilog=epilog("compare"))(compare_command)
app.command("report", cls=Command, epilog=epilog("report"))(report_command)
app.command("demo", cls=Command, epilog=epilog("demo"))(demo_command)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(f"farspan {__version__}")


def main() -> None:
    """Run a command; a user's error ends in one sentence and an exit code, not in a traceback."""
    # torch warns of every norm whose weights stay float32 under autocast; a user cannot act on it.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    for stream in (sys.stdout, sys.stderr):  # a terminal of ASCII, a name that is not UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.getLogger("farspan").addHandler(NOTE_HANDLER)
    try:
        with exit_on_sigterm():
            app()
    except FarspanError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before a command runs, or in one that does not resume
        print_error("stopped by Ctrl-C; rerun the same command")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if (cause := system_error(error)) is None:
            raise
        print_error(describe_system_error(cause))
        sys.exit(FarspanError.exit_code)
