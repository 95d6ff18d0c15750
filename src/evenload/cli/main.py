"""The door: finds the verb, runs it, turns errors into a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TextIO

import typer

from evenload._version import __version__
from evenload.errors import WRONG_INPUT, EvenloadError

VERBS: Final[dict[str, str]] = {
    "check": "evenload.cli.check:check",
    "estimate": "evenload.cli.estimate:run",
    "plan": "evenload.cli.plan:run",
    "names": "evenload.cli.names:run",
    "simulate": "evenload.cli.simulate:run",
    "report": "evenload.cli.report:run",
    "diff": "evenload.cli.diff:run",
    "track": "evenload.cli.track:track",
    "dryrun": "evenload.cli.dryrun:run",
    "profile": "evenload.cli.profile:run",
    "train": "evenload.cli.train:run",
    "convert": "evenload.cli.convert:convert",
}
"""Verb -> `module:function`, in the order of `--help`. A verb is one module and one line here."""

HANDS_ON: Final = frozenset({"track"})
"""Verbs that run something: the words after their first argument belong to that."""
RANKED: Final = frozenset({"profile", "train"})
"""Verbs that torchrun runs, one process a rank."""

BROKEN_PIPE: Final = 141
"""Exit code when the reader of our output went away: what a program killed by SIGPIPE shows."""
INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; None takes them from the process.

    Returns:
        The exit code: 0 yes, 1 answered "no", 2 wrong input, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # a terminal without UTF-8 still gets the answer
    _open_closed_streams()
    stdout = sys.stdout
    try:
        code = _run(words)
        if not stdout.closed:  # by a script that was tracked
            stdout.flush()  # a broken pipe or a full disk shows here, not in the interpreter's last breath
    except EvenloadError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        _drop(stdout)
        code = BROKEN_PIPE
    except OSError as error:
        if error.filename is not None:  # no stream has one, and files are read and written with errors of their own
            raise
        _drop(stdout)
        print(f"error: standard output: cannot write: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        code = WRONG_INPUT
    return code


def entry() -> NoReturn:
    """What the command runs: `main`, and the end of the process with its exit code.

    One of several processes that train ends at once. A thread of gloo's that asks for the interpreter while that
    shuts down is ended by force, before Python 3.14, and takes the process with it: "terminate called without an
    active exception", and the exit code is lost (Python's C API, "Cautions regarding runtime finalization").
    """
    code = main()
    if sys.argv[1:2] and sys.argv[1] in RANKED and os.environ.get("WORLD_SIZE", "1") != "1":
        with suppress(OSError):  # main has said what there is to say of streams that cannot be written
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _open_closed_streams() -> None:
    """Give words somewhere to go where the caller closed a stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open to the end


def _drop(stdout: TextIO) -> None:
    """Point stdout to nowhere: the interpreter flushes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
    sys.stdout = stdout


def _run(words: Sequence[str]) -> int:
    try:
        _app(words)(args=words, prog_name="evenload")
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):  # Typer and rich turn it into exit code 1, which says "no"
            raise done.__context__ from None
        return done.code if isinstance(done.code, int) else 0
    return 0


def _app(words: Sequence[str]) -> typer.Typer:
    """The Typer application with the verb that is asked for, or with all of them for `--help` and mistakes."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_evenload)
    asked = words[0] if words and (words[0] in VERBS or words[0] == "--version") else None
    for verb, target in VERBS.items():
        if asked in (None, verb):
            settings = {"allow_interspersed_args": verb not in HANDS_ON}
            app.command(verb, context_settings=settings)(_load(target))
    return app


def _version(asked: bool) -> None:
    if asked:
        print(f"evenload {__version__}")
        raise typer.Exit


def _evenload(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Fit, balance and plan the memory of large-model training."""


def _load(target: str) -> Callable[..., Any]:
    """The function behind a verb; Ctrl-C in it gets its word before Typer takes it."""
    module, name = target.split(":")
    function = getattr(import_module(module), name)

    @wraps(function)
    def verb(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return verb
