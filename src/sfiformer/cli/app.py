"""The commands together, and how their errors are shown."""

import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from sfiformer import __version__
from sfiformer.cli import data, evaluate, explain, predict, presets, suite, train
from sfiformer.errors import BadRowError, TrainingError
from sfiformer.schema import nearest

# The option by which a command leaves out bad rows of a file.
SKIP_BAD = {"train": "--data.skip_bad true"} | dict.fromkeys(
    ("eval", "predict", "explain", "data"), "--skip-bad"
)
# The settings by which a command takes less memory.
SMALLER = {
    "train": "lower data.batch_size (trainer.accumulate adds up several batches), or model.dim or model.layers",
    "eval": "lower --batch-size",
    "predict": "lower --batch-size",
}
# Errors about a file name these settings as `sfi train` calls them; `sfi data info` calls them otherwise.
OF_TRAIN = re.compile(r"--data\.(kind|level|targets)( of sfi train)?")

app = typer.Typer(
    name="sfi",
    help="Graph transformers with exact sparse-flow-induced attention: train, evaluate, predict, explain.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"sfi {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """What comes before a command."""


train.register(app)
evaluate.register(app)
predict.register(app)
explain.register(app)
presets.register(app)
data.register(app)
suite.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. An error is one line on standard error, its traceback only under --debug.

    Exit codes: 2 for what the user asked wrongly, 1 for any other failure, 130 when interrupted, 143 on SIGTERM.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _tidy_end(), warnings.catch_warnings():
            warnings.showwarning = _each_once()
            code = app(arguments, prog_name="sfi", standalone_mode=False)
    except Exception as error:
        if "--debug" in arguments:
            raise
        sys.exit(_report(error, arguments[0] if arguments else ""))
    except KeyboardInterrupt:
        code = 130
    if code == 130:  # what newer releases of typer make of Ctrl-C
        _say("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _tidy_end() -> Iterator[None]:
    """SIGTERM unwinds a command as Ctrl-C does: no half of a file, no lock and no empty folder is left."""
    if threading.current_thread() is not threading.main_thread():  # others are not told of signals
        yield
        return

    def end(number: int, _: object) -> NoReturn:
        sys.exit(_say("ended by SIGTERM", 128 + number))

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(error: Exception, command: str) -> int:
    if isinstance(error, BrokenPipeError):  # the reader of our output (`head`, say) has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if type(error).__name__ == "Abort":  # typer's, for Ctrl-C
        return _say("interrupted", 130)
    if hasattr(error, "format_message"):  # a usage error of typer, whose class has moved between its releases
        return _say(_usage(error), 2) if error.format_message() else 2  # empty: the help was shown
    message = OF_TRAIN.sub(r"--\1", str(error)) if command == "data" else str(error)
    if isinstance(error, BadRowError) and command in SKIP_BAD:
        return _say(f"{message}; mend it, or leave out such rows with {SKIP_BAD[command]}", 2)
    if isinstance(
        error, ValueError
    ):  # settings, files and graphs that will not do; but a loss may go wrong too
        return _say(message, 1 if isinstance(error, TrainingError) else 2)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return _say(f"{error.filename}: {error.strerror}", 1)
    if isinstance(error, ImportError | OSError):
        return _say(str(error), 1)
    if _is_out_of_memory(error):
        smaller = SMALLER.get(command, "take fewer or smaller graphs")
        return _say(f"out of memory: {smaller} (--debug shows where)", 1)
    return _say(f"{type(error).__name__}: {error} (--debug shows where)", 1)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, NumPy or PyTorch, on a CPU or a GPU, had no memory left."""
    if isinstance(error, MemoryError):
        return True
    # PyTorch's are told by their words: on a CPU they have no class of their own.
    said = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in said or "DefaultCPUAllocator" in said)


def _usage(error: Any) -> str:
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    help_command = f" (see {context.command_path} --help)" if context else ""
    if option is None or context is None:
        return error.format_message().rstrip(".") + help_command
    if hasattr(context.command, "commands"):  # it has no settings that could have been meant
        return f"there is no option {option}{help_command}"
    known = [name for parameter in context.command.params for name in parameter.opts if name[:2] == "--"]
    return f"there is no option {option}; did you mean {nearest(option, known)}?"


def _each_once() -> Callable[..., None]:
    """Shows a warning as a line, as an error is shown, and the same one but once."""
    said = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        line = " ".join(str(message).split())
        if line not in said:
            print(f"warning: {line}", file=sys.stderr)
        said.add(line)

    return show


def _say(message: str, code: int) -> int:
    print(f"sfi: {' '.join(message.split())}", file=sys.stderr)
    return code
