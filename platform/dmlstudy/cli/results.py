"""Commands that show what studies found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from dmlstudy.cli.app import (
    DEFAULT_STORE,
    JsonOption,
    ServerOption,
    StoreOption,
    app,
    store_at,
)
from dmlstudy.cli.tables import say, show_json, show_leaderboard, show_tally


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
    epilog="Examples: `dmlstudy report digits` · `dmlstudy report digits -o digits.html --without-examples`",
)
def report(
    study: Annotated[str, typer.Argument(help="A study of the store, finished or not.")],
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
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Write a study as one HTML page that needs no network: verdict, search, examples, cost, how to do it again.

    It is also kept with the study's run in MLflow, as report.html.
    """
    from dmlstudy.report.study_page import write_report

    place = store_at(store, tracking_uri)
    written = write_report(place, study, output, with_examples=not without_examples)
    if json:
        show_json({"file": str(output), **written._asdict()})
        return
    kept = (
        f"not kept with the study's run: {written.not_kept}"
        if written.not_kept
        else "kept with the study's run too"
    )
    size = output.stat().st_size / 1e6
    say(f"{output}: {written.num_families} families, {size:.1f} MB with all it needs; {kept}")
    if written.notice:
        say(f"not finished: {written.notice}")


@app.command(epilog="Example: `dmlstudy compare digits-embedder/1 digits-embedder/2`")
def compare(
    first: Annotated[str, typer.Argument(help="NAME, NAME@ALIAS or NAME/VERSION.")],
    second: Annotated[str, typer.Argument(help="Another one, judged on the same test data.")],
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Compare two registered versions by the verdict seeds that both families have, and as two models by class."""
    from dmlstudy.registry import promotion

    found = promotion.compared(store_at(store, tracking_uri), first, second)
    if json:
        show_json(found.model_dump(mode="json"))
        return
    for line in found.lines:
        say(line)


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
    say(f"MLflow on http://127.0.0.1:{port} (Ctrl-C ends it)")
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
