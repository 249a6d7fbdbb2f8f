"""Commands that show what studies found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Optional

import typer

from dmlstudy.cli.app import (
    DEFAULT_STORE,
    ItemsOption,
    JsonOption,
    MapKindOption,
    SaveMapsOption,
    ServerOption,
    StoreOption,
    WithoutCompatibilityOption,
    app,
    store_at,
)
from dmlstudy.cli.tables import say, show_json, show_leaderboard, show_tally
from dmlstudy.text import counted, one_line

MOST_OF_SENTENCE = 2000
"""Characters of the sentence on what matters; of names that are longer the middle is left out."""

if TYPE_CHECKING:
    from dmlstudy.registry.compatibility import Compatibility
    from dmlstudy.store import Store


@app.command(
    epilog="Examples: `dmlstudy leaderboard digits` · `dmlstudy leaderboard digits --json` ·"
    " `dmlstudy leaderboard digits --format parquet -o digits.parquet` ·"
    " `dmlstudy leaderboard cifar10-online fashion-online --against oahu`",
)
def leaderboard(
    studies: Annotated[list[str], typer.Argument(help="A study of the store; with --against any number.")],
    against: Annotated[
        Optional[str], typer.Option("--against", help="Only win/tie/loss of this family, over the studies.")
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="table, json, or csv and parquet: a row for each family.")
    ] = "table",
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="The file of json, csv or parquet.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Each family's best with its scores and how sure they are."""
    from dmlstudy.registry.leaderboard import leaderboard as read

    format = "json" if json else format
    _check_form(format, output, against)
    boards = [read(store_at(store, tracking_uri), study) for study in studies]
    if against is not None:
        show_tally(boards, against, as_json=format == "json")
        return
    if len(boards) > 1:
        raise ValueError(
            "several studies have no common leaderboard; --against FAMILY counts its wins over them"
        )
    if output is not None:
        from dmlstudy.registry import leaderboard_file

        leaderboard_file.write(boards[0], output, format)
        say(f"{output}: {len(boards[0].rows)} families")
    elif format == "json":
        print(boards[0].model_dump_json(indent=1))
    elif format == "csv":
        from dmlstudy.registry import leaderboard_file

        sys.stdout.write(leaderboard_file.csv_text(boards[0]))
    else:
        show_leaderboard(boards[0])


@app.command(
    epilog="Examples: `dmlstudy report digits` · `dmlstudy report digits -o digits.html --without-examples` ·"
    " `dmlstudy report digits --verify` · `dmlstudy report --serving watch.jsonl -o queries.html`",
)
def report(
    study: Annotated[
        Optional[str], typer.Argument(help="A study of the store, finished or not; not with --serving.")
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The HTML page to write; no other file is replaced.")
    ] = Path("report.html"),
    without_examples: Annotated[
        bool,
        typer.Option(
            "--without-examples",
            help="Leave out what needs the winner and the test data, and most of the time.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Write nothing; compare the study with the plan that was sealed before its first test image.",
        ),
    ] = False,
    serving: Annotated[
        Optional[Path],
        typer.Option(
            "--serving",
            help="Draw a server's queries in place of a study: a file of `dmlstudy serve --watch`.",
        ),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Write a study as one HTML page that needs no network: verdict, search, examples, cost, how to do it again.

    It is also kept with the study's run in MLflow, as report.html. With `--verify` the study file, folds, data and
    verdict trials are compared with the sealed plan: exit code 1, and a line on what differs, if anything does.

    With `--serving` the page shows how far a server's queries were from their nearest items, and when they left the
    range.
    """
    if serving is not None:
        if study is not None or verify or without_examples:
            raise ValueError(
                "--serving: draws a server, not a study; leave STUDY, --verify and --without-examples out"
            )
        _report_serving(serving, output, json)
        return
    if study is None:
        raise ValueError("name a study, or a file of `dmlstudy serve --watch` with --serving")
    place = store_at(store, tracking_uri)
    if verify:
        from dmlstudy.studies.sealing import verify as compared

        found = compared(place, study)
        if json:
            show_json({"study": study, "plan_sha256": found.digest, "differing": found.differing})
        else:
            say(f"{study}: {found}")
        if found.differing:
            raise typer.Exit(1)
        return
    from dmlstudy.report.study_page import write_report

    written = write_report(place, study, output, with_examples=not without_examples)
    if json:
        rows = {
            name: [each.model_dump() for each in getattr(written, name)] for name in ("parameters", "earlier")
        }
        show_json({"file": str(output), **written._asdict(), **rows})
        return
    kept = (
        f"not kept with the study's run: {written.not_kept}"
        if written.not_kept
        else "kept with the study's run too"
    )
    size = output.stat().st_size / 1e6
    say(f"{output}: {written.num_families} families, {size:.1f} MB with all it needs; {kept}")
    if written.matters:
        say(one_line(written.matters, MOST_OF_SENTENCE))
    if written.notice:
        say(f"not finished: {written.notice}")


def _report_serving(record: Path, output: Path, json: bool) -> None:
    from dmlstudy.report.serving_page import write_serving_report

    written = write_serving_report(record, output)
    if json:
        show_json({"file": str(output), **written._asdict()})
        return
    leave = "leaves" if written.num_outside == 1 else "leave"
    say(
        f"{output}: {counted(written.num_windows, 'window', 'windows')}, {written.num_outside} {leave} the range"
    )


@app.command(
    epilog="Examples: `dmlstudy compare digits-embedder/2 digits-embedder/1` ·"
    " `dmlstudy compare digits-embedder@challenger digits-embedder --map linear --save-maps maps --items 10000000`",
)
def compare(
    first: Annotated[str, typer.Argument(help="NAME, NAME@ALIAS or NAME/VERSION; the new one.")],
    second: Annotated[str, typer.Argument(help="Another one, judged on the same test data; the old one.")],
    map: MapKindOption = "linear",
    save_maps: SaveMapsOption = None,
    items: ItemsOption = None,
    without_compatibility: WithoutCompatibilityOption = False,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Compare two registered versions by the verdict seeds that both families have, and as two models by class.

    Told as well: queries of the first, new one in items of the second, old one on the test classes, as they are and
    through maps fitted on development data, and what embedding a gallery anew costs.
    """
    from dmlstudy.registry import promotion

    place = store_at(store, tracking_uri)
    found = promotion.compared(place, first, second)
    beside = compatibility_of(place, first, second, map, save_maps, items, is_left_out=without_compatibility)
    if json:
        more = {} if beside is None else {"compatibility": beside.facts}
        show_json({**found.model_dump(mode="json"), **more})
        return
    for line in [*found.lines, *([] if beside is None else beside.lines)]:
        say(line)


class Beside(NamedTuple):
    """The compatibility beside another answer, or the reason why it is not told; ``saved`` is where maps are."""

    found: Compatibility | None
    why_not: str = ""
    saved: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """The same for programs."""
        if self.found is None:
            return {"not_told": self.why_not}
        return {**self.found.model_dump(mode="json"), "maps": list(self.saved)}

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        if self.found is None:
            return [f"compatibility is not told: {self.why_not}"]
        return [*self.found.lines, *self.saved]


def compatibility_of(
    place: Store,
    new: str,
    old: str,
    kind: str,
    save_maps: Path | None,
    items: int | None,
    *,
    is_left_out: bool,
) -> Beside | None:
    """The compatibility of two versions; None where it is left out.

    Where the models or the data are not here the reason is told. It is an error only where maps are to be saved.
    """
    from dmlstudy.registry import compatibility
    from dmlstudy.saved.space_map import check_map_kind

    checked = check_map_kind(kind)
    if is_left_out:
        if save_maps is not None:
            raise ValueError(
                "--save-maps: maps are fitted with the compatibility; leave --without-compatibility out"
            )
        return None
    try:
        if save_maps is not None:
            compatibility.check_place(save_maps)
        found, maps = compatibility.measured(place, new, old, checked, num_items=items)
    except (ValueError, OSError) as error:
        if save_maps is not None:
            raise
        return Beside(None, one_line(error))
    if save_maps is None:
        return Beside(found)
    kept = maps.save(save_maps)
    return Beside(
        found,
        saved=tuple(
            f"map {each.digest[:12]} in {save_maps / name}"
            for name, each in ((compatibility.NEW_TO_OLD, kept[0]), (compatibility.OLD_TO_NEW, kept[1]))
        ),
    )


@app.command(
    epilog="Examples: `dmlstudy ui --port 5000` · `dmlstudy ui --tracking-uri http://HOST:5000`",
)
def ui(
    port: Annotated[int, typer.Option(help="Where the page listens, on loopback only.")] = 5000,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Open MLflow's page on the store, and say where it has each study's leaderboard.

    With `--tracking-uri` the page is the server's own: only the addresses are printed.
    """
    from dmlstudy.registry.mlflow_ui import check, serve
    from dmlstudy.registry.mlflow_view import links

    place = store_at(store, tracking_uri)
    if place.server is not None:
        for study, link in links(place, port).items():
            print(f"{study}: {link.replace(f'http://127.0.0.1:{port}', place.server.rstrip('/'))}")
        return
    check(place, port)
    say(f"MLflow on http://127.0.0.1:{port} in some seconds (Ctrl-C ends it)")
    for study, link in links(place, port).items():
        say(f"{study}: {link}")
    serve(place, port)


def _check_form(form: str, output: Path | None, against: str | None) -> None:
    """Raises ValueError for an unknown form, and for one that does not fit its destination."""
    if form not in ("table", "json", "csv", "parquet"):
        raise ValueError(f"--format {form}: choose from table, json, csv, parquet")
    if form == "parquet" and output is None:
        raise ValueError("--format parquet is a file: name it with -o")
    if output is not None and (form == "table" or against is not None):
        raise ValueError(
            "-o is for a study's leaderboard in --format json, csv or parquet; set one, or leave -o away"
        )
