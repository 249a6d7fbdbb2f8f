"""The Python interface: run a study, read one as data frames, in a script or a notebook."""

from __future__ import annotations

import html
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from dmlstudy.metric_names import for_people, on_retention, on_test
from dmlstudy.registry import leaderboard_file
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.store import Store

Tell = Callable[[str], None]

DTYPES = {"int64": "Int64", "float64": "float64", "bool": "bool"}
"""Of a column by its kind: numbers that are not known are missing; text stays as pandas has it."""


class Study:
    """A study of a store, running or ended; each method reads what is there by now."""

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self.store = store
        self._board = leaderboard(store, name)

    @property
    def status(self) -> str:
        """The study's state: running, interrupted, failed or finished."""
        return self._read().status

    @property
    def winner(self) -> str | None:
        """The family with the best validation objective, once the study has ended."""
        return self._read().winner

    @property
    def model(self) -> str | None:
        """The registered model, for ``models.load``."""
        return self._read().model

    def leaderboard(self) -> pd.DataFrame:
        """A row for each family, best first: its search, its test scores with 95% intervals, its best configuration."""
        columns = leaderboard_file.columns(self._read())
        return pd.DataFrame(
            {each.name: pd.Series(list(each.values), dtype=DTYPES.get(each.kind)) for each in columns}
        )

    def trials(self) -> pd.DataFrame:
        """A row for each trial of the search that has ended, with its searched parameters (``param.``)."""
        from dmlstudy.search.history import searched

        rows = [
            {
                "number": trial.number,
                "family": family,
                "status": trial.status,
                "score": trial.score,
                "num_reports": len(trial.curve),
                "reason": trial.reason,
                **{f"param.{name}": value for name, value in trial.params.items()},
            }
            for family, own in searched(self.store, self.name).items()
            for trial in own.trials
        ]
        columns = None if rows else ["number", "family", "status", "score", "num_reports", "reason"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.sort_values("number", ignore_index=True)

    def parameters(self) -> pd.DataFrame:
        """A row for each searched parameter of each family: importance, and how far the objective moves."""
        from dmlstudy.report.sensitivities import ParameterEffect, effects
        from dmlstudy.search.history import searched

        rows = [each.model_dump() for each in effects(list(searched(self.store, self.name).values()))]
        return pd.DataFrame(rows, columns=list(ParameterEffect.model_fields))

    def comparisons(self) -> pd.DataFrame:
        """A row for each pair of judged families: the effect, its interval, Holm's p-value and what follows."""
        from dmlstudy.verdict.comparison import Comparison

        rows = [each.model_dump() for each in self._read().comparisons]
        return pd.DataFrame(rows, columns=list(Comparison.model_fields))

    def report(self, path: str | Path = "report.html", *, with_examples: bool = True) -> Path:
        """Write the study as one HTML page; raises ValueError for a path that may not be written."""
        from dmlstudy.report.study_page import write_report

        output = Path(path).expanduser()
        write_report(self.store, self.name, output, with_examples=with_examples)
        return output

    def __repr__(self) -> str:
        return f"<{self._told()}>"

    def _repr_html_(self) -> str:
        board = self._board
        metric = on_test(board.objective)
        elsewhere = [on_retention(board.objective)] if board.retention else []
        known = (for_people(name) for name in (metric, *elsewhere))
        head = ("family", f"validation {board.objective}", *known, "seeds")
        rows = [
            (
                f"{row.family}{' *' if row.family == board.winner else ''}",
                "" if row.validation is None else f"{row.validation:.4f}",
                str(row.test.get(metric, "")),
                *(str(row.retention.get(name, "")) for name in elsewhere),
                str(row.num_judged or ""),
            )
            for row in board.rows
        ]
        lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
        told = html.escape(self._told())
        return (
            f"<p>{told}</p><table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{lines}</tbody></table>"
        )

    def _told(self) -> str:
        board = self._board
        winner = f", winner {board.winner}" if board.winner else ""
        model = f", registered as {board.model}" if board.model else ""
        return f"study {board.study}: {board.status}, {len(board.rows)} families{winner}{model}"

    def _read(self) -> Leaderboard:
        self._board = leaderboard(self.store, self.name)
        return self._board


def run(
    study: str | Path | Mapping[str, Any],
    *,
    store: str | Path | None = None,
    address: str | None = None,
    name: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    tracking_uri: str | None = None,
    tell: Tell = print,
) -> Study:
    """Run a study, or the rest of it, to its verdict.

    ``study`` is the path of a study file, or its content as a mapping. ``overrides`` replace some of its values,
    as ``{"training.epochs": 1}``. ``store`` is by default DMLSTUDY_STORE, or the folder dmlstudy_store, as
    ``tracking_uri`` is DMLSTUDY_TRACKING_URI. ``address`` is a Ray cluster's; by default Ray runs here meanwhile.
    ``tell`` gets a line for each trial, and may print it.

    An interrupt (Ctrl-C, a notebook's stop button, `dmlstudy stop`) ends it by a KeyboardInterrupt; what was
    finished is kept, and the same call resumes it. Raises ValueError for faults found before it starts, and
    ``studies.conclude.StudyFailed`` where no trial finishes.
    """
    from dmlstudy.engine.interruption import StudyInterrupted
    from dmlstudy.engine.progress import as_long_as_heard
    from dmlstudy.spec import study_file
    from dmlstudy.studies.run import run_study

    if isinstance(study, Mapping):
        spec = study_file.given(study, name, overrides or {})
    else:
        spec = study_file.load(study, name, overrides or {})
    place = store_at(store, tracking_uri)
    for note in spec.notes:
        tell(f"note: {note}")
    try:
        with _beside_the_engine(tell) as heard:
            run_study(spec, place, address=address, tell=as_long_as_heard(heard))
    except StudyInterrupted:
        again = place.command("resume", spec.name)
        raise KeyboardInterrupt(
            f"study {spec.name} is interrupted; what was finished is kept: run it again, or `{again}`"
        ) from None
    return Study(place, spec.name)


def init(
    folder: str | Path,
    output: str | Path = "study.yaml",
    *,
    name: str | None = None,
    image_size: int | None = None,
    budget: str = "standard",
) -> Path:
    """Write a study file for a folder of pictures, with a batch and folds that go with its number of classes.

    ``folder`` has a sub-folder of pictures for each class, or train and test with such. ``budget`` is quick (minutes),
    standard, or thorough (as for a paper). ``image_size`` is in pixels of a side; by default the pictures', 28 to 64.

    Raises ValueError for a folder no study can be made of, and for a file that is there already.
    """
    from dmlstudy.studies import first_study
    from dmlstudy.studies.wall_time import this_machine

    written = Path(output).expanduser()
    pictures = Path(folder).expanduser()
    first_study.write(
        pictures, written, name=name, image_size=image_size, budget=budget, machine=this_machine()
    )
    return written


def load(store: str | Path | None, study: str, *, tracking_uri: str | None = None) -> Study:
    """A study of a store; None is the default store. Raises ValueError where there is no such study."""
    return Study(store_at(store, tracking_uri), study)


def store_at(root: str | Path | None, tracking_uri: str | None = None) -> Store:
    """The store in a folder; None is DMLSTUDY_STORE, or the folder dmlstudy_store, and DMLSTUDY_TRACKING_URI."""
    server = tracking_uri or os.environ.get("DMLSTUDY_TRACKING_URI") or None
    given = {} if root is None else {"--store": str(root)}
    if tracking_uri:
        given["--tracking-uri"] = tracking_uri
    folder = Path(root or os.environ.get("DMLSTUDY_STORE") or "dmlstudy_store")
    return Store(folder.expanduser().absolute(), server, given=given)


@contextmanager
def _beside_the_engine(tell: Tell) -> Iterator[Tell]:
    """``tell``, which prints as ever while what the process prints is turned to the engine's log.

    Lines come from several threads, and the streams are the process's: one at a time has them.
    """
    with _seen(sys.stdout) as out, _seen(sys.stderr) as err:
        own_turn = threading.RLock()

        def tell_apart(line: str) -> None:
            with own_turn, redirect_stdout(out), redirect_stderr(err):
                tell(line)
                out.flush()

        yield tell_apart


def _seen(stream: TextIO) -> AbstractContextManager[TextIO]:
    """A stream to where this one leads, whatever becomes of file descriptors 1 and 2.

    A notebook's streams lead elsewhere, and are taken as they are.
    """
    from dmlstudy.engine.progress import standard_descriptor, terminal

    descriptor = standard_descriptor(stream)
    if descriptor is None:
        return nullcontext(stream)
    stream.flush()
    return terminal(descriptor)


def _cells(tag: str, texts: tuple[str, ...]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
