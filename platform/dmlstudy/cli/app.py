"""The application, what its commands share, and what becomes of an error: one line."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer

from dmlstudy.text import nearest, one_line

if TYPE_CHECKING:
    from dmlstudy.saved import Model
    from dmlstudy.store import Store


app = typer.Typer(
    help="Hyperparameter studies for deep metric learning on Ray: run, compare, register, pull, use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done · 1 a study or job failed, or what was asked for is not so (a champion that stays, a"
    " study that does not run) · 2 wrong input, or a store or cluster that cannot be used, in one line ·"
    " 130 interrupted by Ctrl-C · 143 ended by SIGTERM.",
)

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C ended: typer makes it of a KeyboardInterrupt, as shells do."""


GIVEN: dict[str, str] = {}
"""The options of this command line, not of the environment, that say which store, server and cluster."""


def _noted(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    """The value of an option; kept for the commands that messages advise, if it was given on the command line."""
    source = context.get_parameter_source(str(option.name))
    if source is not None and source.name == "COMMANDLINE":
        GIVEN[option.opts[0]] = str(value)
    return value


StoreOption = Annotated[
    Path,
    typer.Option("--store", envvar="DMLSTUDY_STORE", help="Folder of studies and models.", callback=_noted),
]


ServerOption = Annotated[
    Optional[str],
    typer.Option(
        "--tracking-uri",
        envvar="DMLSTUDY_TRACKING_URI",
        help="MLflow server to use instead of the store's own database.",
        callback=_noted,
    ),
]


PatienceOption = Annotated[
    Optional[float],
    typer.Option(
        "--tracking-timeout",
        envvar="DMLSTUDY_TRACKING_TIMEOUT",
        show_envvar=False,  # it would be cut in 80 columns
        min=0,
        help="Seconds a running study waits for an MLflow server, or its PostgreSQL, that is away; then it stops, to be"
        " resumed."
        " Default: 600. Also DMLSTUDY_TRACKING_TIMEOUT.",
    ),
]


ClusterOption = Annotated[
    Optional[str],
    typer.Option(
        "--address",
        help="A running Ray cluster ('auto' for this node's); default: start Ray here.",
        callback=_noted,
    ),
]


AddressOption = Annotated[Optional[str], typer.Option("--address", help="The cluster, as http://HOST:8265.")]


JobOption = Annotated[Optional[str], typer.Option("--job", help="A job id that `submit` printed.")]


SetOption = Annotated[
    Optional[list[str]],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the study file: `training.epochs=1`,"
        " `families.NAME.override.loss.margin=0.3`; any number of times.",
    ),
]


SizeOption = Annotated[
    Optional[int],
    typer.Option(
        "--size", min=1, help="Keep only the first so many numbers, normalised again; 64. Default: all."
    ),
]


MapKindOption = Annotated[
    str,
    typer.Option(
        "--map",
        help="Maps that are fitted between both spaces: linear (ridge), orthogonal (Procrustes) or mlp; `--map mlp`.",
    ),
]


SaveMapsOption = Annotated[
    Optional[Path],
    typer.Option(
        "--save-maps",
        help="Also write both maps, new-to-old and old-to-new, into this folder; `--save-maps maps`.",
    ),
]


ItemsOption = Annotated[
    Optional[int],
    typer.Option(
        "--items",
        min=1,
        help="Items of your gallery, whose cost is told; `--items 10000000`. Default: a million.",
    ),
]


WithoutCompatibilityOption = Annotated[
    bool,
    typer.Option(
        "--without-compatibility",
        help="Leave out the scores across both models, which need the models and the data here.",
    ),
]


JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]


QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


DEFAULT_STORE = Path("dmlstudy_store")


LONGEST_ERROR = 1000
"""Characters of an error's line; what is longer loses its middle, for the advice stands at its end."""


ENGINES = ("mlflow", "optuna", "ray", "sqlalchemy")
"""Libraries whose unexpected errors become one line too."""


class _Terminated(BaseException):
    """SIGTERM, where nobody else hears it: what a command holds is let go of, as after Ctrl-C."""


def main() -> None:
    """Run the command line; wrong input and what the machine refuses are one line and exit code 2."""
    try:
        try:
            with _sigterm_heard():
                if "" in sys.argv[1:]:
                    raise ValueError(
                        "an argument is empty, as of a variable of the shell that is not set; give it, or leave it out"
                    )
                code = app(prog_name="dmlstudy", standalone_mode=False)
        finally:
            sys.stdout.flush()
        if code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except _Terminated:
        print("ended by SIGTERM", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except typer.Abort:
        print("aborted", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # who read it has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if any(isinstance(each, KeyboardInterrupt) for each in _causes(error)):  # in a library that wraps it
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        line = _error_line(error)
        if line is None or os.environ.get("DMLSTUDY_DEBUG"):
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error from which one was raised, and those before it."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


@contextmanager
def _sigterm_heard() -> Iterator[None]:
    """In its block SIGTERM raises, unless it is ignored."""

    def hear(number: int, frame: object) -> None:
        raise _Terminated

    is_heard = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if is_heard:
        signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        if is_heard:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_interrupted(again: str) -> NoReturn:
    """End a study's command that was interrupted; ``again`` names the one that goes on."""
    from dmlstudy.engine.interruption import interrupted

    print(interrupted(again), file=sys.stderr)
    sys.exit(INTERRUPTED)


def _error_line(error: Exception) -> str | None:
    """An error's message for people, in one line; None for a bug of this program."""
    if hasattr(error, "format_message"):
        text = _usage_line(error)
    elif isinstance(error, OSError):
        text = _os_error_line(error)
    elif isinstance(error, MemoryError):
        text = "out of memory; free some, or take smaller batches, images or models"
    elif isinstance(error, RecursionError):
        text = "the input is nested too deeply"
    elif isinstance(error, ValueError):
        text = str(error)
    elif type(error).__module__.partition(".")[0] in ENGINES:
        text = f"{type(error).__name__}: {error} (DMLSTUDY_DEBUG=1 shows where)"
    else:
        return None
    return one_line(text, LONGEST_ERROR) or type(error).__name__


def _usage_line(error: Any) -> str:
    """Typer's message about a wrong command line, with the nearest option and a pointer to the help."""
    text, context = error.format_message() or "name a command", error.ctx
    if hasattr(error, "possibilities"):
        options = [name for parameter in context.command.get_params(context) for name in parameter.opts]
        near = nearest(error.option_name, [name for name in options if name.startswith("-")])
        text = f"{error.message}{near}"
    return f"{text} (`{context.command_path} -h` tells more)" if context else text


def _os_error_line(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}{what}; free some room, then do the same again"
    if error.errno == errno.EROFS:
        return f"{where}{what}; name a place that can be written"
    return f"{where}{what}; see that it is there, may be used and has room"


def _show_version(is_requested: bool) -> None:
    if is_requested:
        import dmlstudy

        print(f"dmlstudy {dmlstudy.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Hyperparameter studies for deep metric learning on Ray: run, compare, register, pull, use."""
    GIVEN.clear()


@contextmanager
def model_at(
    reference: str, store: Path, tracking_uri: str | None, *, device: str = "cpu", batch_size: int = 256
) -> Iterator[Model]:
    """A model, opened: of a folder that was pulled, which needs no MLflow, or of a copy of a registered one."""
    from dmlstudy import saved

    if saved.is_model(reference):
        yield saved.Model.open(
            Path(reference).absolute(), device=device, batch_size=batch_size, name=reference
        )
        return
    from dmlstudy.registry.models import fetched

    with fetched(store_at(store, tracking_uri), reference, device=device, batch_size=batch_size) as opened:
        yield opened


def store_at(root: Path, tracking_uri: str | None = None, patience_s: float | None = None) -> Store:
    from dmlstudy.store import Store

    place = Store(root.expanduser().absolute(), tracking_uri, given=dict(GIVEN))
    return place if patience_s is None else replace(place, patience_s=patience_s)
