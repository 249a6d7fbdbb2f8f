"""Commands of registered models, and those that use a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

from dmlstudy.cli.app import (
    DEFAULT_STORE,
    AddressOption,
    ItemsOption,
    JsonOption,
    MapKindOption,
    SaveMapsOption,
    ServerOption,
    SizeOption,
    StoreOption,
    WithoutCompatibilityOption,
    app,
    model_at,
    store_at,
)
from dmlstudy.cli.tables import SCORES, console, say, show_json, show_table
from dmlstudy.metric_names import on_test

if TYPE_CHECKING:
    from dmlstudy.cli.results import Beside
    from dmlstudy.registry.promotion import Decision
    from dmlstudy.saved.space_map import SpaceMap
    from dmlstudy.serving.embed import EmbedResult
    from dmlstudy.serving.watch import WatchPlan


QueryMapOption = Annotated[
    Optional[Path],
    typer.Option(
        "--map",
        help="A map from this model's space to that of the gallery's model, for queries; `--map maps/new-to-old`.",
    ),
]


@app.command(
    epilog="Examples: `dmlstudy models` · `dmlstudy models digits-embedder`",
)
def models(
    name: Annotated[
        Optional[str], typer.Argument(help="Only this model, its versions' ancestry and what was decided.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """The registered models, with two of their scores on the test classes or rows."""
    from dmlstudy.registry import ancestry, promotion
    from dmlstudy.registry.models import versions

    place = store_at(store, tracking_uri)
    listed = [version for version in versions(place) if name in (None, version.name)]
    if name is not None and not listed:
        listing = place.command("models")
        raise ValueError(f"no model {name!r} in the store {place.tracking_uri}; `{listing}` lists them")
    if json:
        decisions = promotion.history(place, name) if name is not None else []
        versions_of = [version.model_dump(mode="json") for version in listed]
        history = (
            {"history": [_decision_facts(decision) for decision in decisions]} if name is not None else {}
        )
        show_json({"versions": versions_of, **history})
        return
    table = Table("model", "version", "alias", "study", "family", "test scores", box=None)
    for version in listed:
        shown = [metric for metric in SCORES if on_test(metric) in version.metrics][:2]
        table.add_row(
            version.name,
            str(version.version),
            ", ".join(version.aliases),
            version.study,
            version.family,
            ", ".join(f"{metric} {version.metrics[on_test(metric)]:.4f}" for metric in shown),
        )
    console.print(table, highlight=False)
    for version in listed if name is not None else []:
        if version.ancestry:
            say(f"{version.name}/{version.version} trained from {ancestry.line(version.ancestry)}")
    for decision in promotion.history(place, name) if name is not None else []:
        say(f"{decision.at}  {promotion.said(decision, name or '')}")


@app.command(
    epilog="Examples: `dmlstudy promote digits-embedder@challenger` ·"
    " `dmlstudy promote digits-embedder/2 --anyway 'half the size'` ·"
    " `dmlstudy promote digits-embedder/2 --map orthogonal --save-maps maps --items 10000000`",
)
def promote(
    model: Annotated[str, typer.Argument(help="NAME@ALIAS or NAME/VERSION.")],
    anyway: Annotated[
        Optional[str], typer.Option("--anyway", help="Promote without a comparison, for this reason.")
    ] = None,
    map: MapKindOption = "linear",
    save_maps: SaveMapsOption = None,
    items: ItemsOption = None,
    without_compatibility: WithoutCompatibilityOption = False,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Put a version in use, if the paired comparison with the champion says better; else the champion stays.

    Told as well, and deciding nothing: how the version's queries do in a gallery of the champion's, as they are and
    through a map, and what embedding such a gallery anew costs.
    """
    from dmlstudy.cli.results import compatibility_of
    from dmlstudy.registry import promotion

    place = store_at(store, tracking_uri)
    rivals = promotion.rivals(place, model)
    beside = None
    if rivals is not None:
        beside = compatibility_of(place, *rivals, map, save_maps, items, is_left_out=without_compatibility)
    elif save_maps is not None:
        raise ValueError("--save-maps: there is no champion whose gallery a map would lead to; leave it out")
    if beside is not None and beside.found is not None:  # before: called again, a champion has no rival
        promotion.note_compatibility(place, model, beside.found)
    decision = promotion.promote(place, model, anyway)
    _show_decision(decision, model.partition("@")[0].partition("/")[0], json, beside)
    if not decision.is_promoted:
        raise typer.Exit(1)


@app.command(epilog="Example: `dmlstudy rollback digits-embedder`")
def rollback(
    name: Annotated[str, typer.Argument(help="A registered model.")],
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Put the version back in use that was before the present champion; again: the one before that."""
    from dmlstudy.registry import promotion

    decision = promotion.rollback(store_at(store, tracking_uri), name)
    _show_decision(decision, name, json)


@app.command(epilog="Example: `dmlstudy pull digits-embedder@champion --to model`")
def pull(
    model: Annotated[str, typer.Argument(help="NAME, NAME@ALIAS or NAME/VERSION.")],
    to: Annotated[Path, typer.Option("--to", help="The folder to make.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model that is there, in one step; nothing but a model.")
    ] = False,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Copy a registered model into a new folder, checked: every file's SHA-256, and what it computes."""
    from dmlstudy.registry.models import pull as fetch

    version = fetch(store_at(store, tracking_uri), model, to, replace=force)
    if json:
        show_json({"folder": str(to), **version.model_dump(mode="json")})
        return
    say(f"{version.name}/{version.version} in {to}: SHA-256 of every file verified, its example reproduced")


@app.command(
    epilog="Examples: `dmlstudy embed digits-embedder@champion images/ -o embeddings.parquet` ·"
    " `dmlstudy embed model table.csv -o embeddings.parquet --workers 4` ·"
    " `dmlstudy embed model images/ -o short.parquet --size 64 --bits 8` ·"
    " `dmlstudy embed new-model old-gallery --map maps/old-to-new -o gallery`",
)
def embed(
    model: Annotated[str, typer.Argument(help="A registered model, or a folder that was pulled.")],
    input: Annotated[
        Path,
        typer.Argument(
            help="Image folder, image, .csv or .parquet table, .npy or .npz; vectors for models of these. With --map"
            " an old model's gallery, or a file that it embedded."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="The Parquet file to write; with --map any other name is a new gallery's folder.",
        ),
    ],
    size: SizeOption = None,
    bits: Annotated[
        int,
        typer.Option(
            "--bits", help="Bits of each number: 32 (float), 8 (int8) or 1 (its sign, packed); `--bits 8`."
        ),
    ] = 32,
    map: Annotated[
        Optional[Path],
        typer.Option(
            "--map",
            help="Take an old model's vectors into this model's space, without pictures; `--map maps/old-to-new`.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Items computed at once.")] = 256,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Processes, with a GPU each where there are GPUs; more than one run on Ray."
        ),
    ] = 1,
    on_corrupt: Annotated[
        str,
        typer.Option(
            help="A picture that is damaged, too large or of numbers without a range: error, or skip (told)."
        ),
    ] = "error",
    max_pixels: Annotated[
        Optional[int],
        typer.Option(min=1, help="Pixels that a picture of yours may have; default: 178,956,970."),
    ] = None,
    address: AddressOption = None,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Embed images or vectors into a Parquet file with the columns id, label and embedding.

    If interrupted, it resumes from its parts when called again; of files, also after one was removed or repaired.
    Items that were left out are listed in the Parquet file's metadata, under dmlstudy.left_out.

    With `--map` nothing is embedded: the vectors of an old gallery are mapped, in batches.
    """
    from rich.progress import track

    from dmlstudy.serving.embed import EmbedJob, Runner, check_on_corrupt, embed_into, one_by_one, told

    if map is not None:
        if size is not None or bits != 32 or workers > 1 or address:
            raise ValueError(
                "--map: maps whole vectors in one process; leave --size, --bits, --workers and --address out, and make"
                " them short by `dmlstudy index`"
            )
        _embed_by_map(model, input, output, map, json, store, tracking_uri)
        return
    run: Runner = one_by_one
    shown = Console(stderr=True)
    quiet: AbstractContextManager[None] = nullcontext()
    if workers > 1 or address:
        from dmlstudy.engine.embed_on_ray import on_cluster, quiet_engine
        from dmlstudy.engine.progress import terminal
        from dmlstudy.records import ResourcesConfig

        shown, quiet = Console(file=terminal(2)), quiet_engine()

        def last_words(line: str) -> None:
            shown.show_cursor()  # the process ends here, and the bar has hidden it
            print(line, file=shown.file)

        run = on_cluster(address, ResourcesConfig(workers=workers), last_words)

    def follow(parts: Iterable[int], number: int) -> Iterable[int]:
        return track(
            parts, description="embedding", total=number, console=shown, disable=not shown.is_terminal
        )

    is_shared = run is not one_by_one  # then this process hands out parts, and computes nothing
    with model_at(
        model, store, tracking_uri, device="cpu" if is_shared else device, batch_size=batch_size
    ) as opened:
        corrupt = check_on_corrupt(on_corrupt)
        job = EmbedJob.of(
            opened,
            input,
            output,
            device=device,
            on_corrupt=corrupt,
            max_pixels=max_pixels,
            size=size,
            bits=bits,
        )
        with quiet:
            made = embed_into(job, run, follow)
        lines = told(job, made)
    if json:
        show_json({"file": str(output), **made._asdict()})
        return
    for line in lines:
        say(line)
    say(f"{made.num_items} embeddings of size {_form_line(made)} in {output}")


def _form_line(made: EmbedResult) -> str:
    """The size of vectors with bits and bytes."""
    if made.bits == 32 and made.dim == made.whole:
        return f"{made.dim} ({made.bytes_per_vector} bytes each)"
    return f"{made.dim} x {made.bits} bit ({made.bytes_per_vector} bytes each, whole {4 * made.whole})"


def _embed_by_map(
    model: str, old: Path, output: Path, folder: Path, json: bool, store: Path, tracking_uri: str | None
) -> None:
    """The command `embed` with a map."""
    from rich.progress import track

    from dmlstudy.saved.space_map import SpaceMap
    from dmlstudy.serving.mapping import map_into

    space_map, shown = SpaceMap.open(folder), Console(stderr=True)

    def follow(batches: Iterable[Any], number: int) -> Iterable[Any]:
        return track(
            batches, description="mapping", total=number, console=shown, disable=not shown.is_terminal
        )

    with model_at(model, store, tracking_uri) as opened:
        made = map_into(opened, old, output, space_map, follow)
    if json:
        show_json({"file": str(output), "map": space_map.digest, **made._asdict()})
        return
    say(
        f"{made.num_items} vectors mapped ({space_map.described.kind}, map {space_map.digest[:12]}) to size"
        f" {_form_line(made)} in {output}"
    )


@app.command(
    epilog="Examples: `dmlstudy export digits-embedder@champion --format onnx` ·"
    " `dmlstudy export model --format torch_export -o embedder.pt2`",
)
def export(
    model: Annotated[str, typer.Argument(help="A registered model, or a folder that was pulled.")],
    format: Annotated[str, typer.Option("--format", help="onnx (needs dmlstudy[export]) or torch_export.")],
    output: Annotated[
        Optional[Path],
        typer.Option("-o", "--output", help="The file to write; default: the model's name, here."),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Write a model as one file for other runtimes, with its preprocessing, checked against the model."""
    from dmlstudy.serving import export as exports

    path = output or exports.default_output(model, format)
    with model_at(model, store, tracking_uri) as opened:
        made = exports.export(opened, path, format)
    if json:
        show_json({"file": str(path), "difference": made.difference, **made.about})
        return
    entry = made.about["input"]
    shape = ", ".join(map(str, entry["shape"]))
    say(
        f"{path}: {entry['name']} {entry['dtype']} ({shape}) to {', '.join(made.about['outputs'])};"
        f" differs from the model by {made.difference:.1e} at most"
    )


@app.command(
    epilog="Examples: `dmlstudy index embeddings.parquet -o gallery` ·"
    " `dmlstudy index embeddings.parquet -o gallery --kind ivf` ·"
    " `dmlstudy index embeddings.parquet -o gallery --size 64 --bits 1`",
)
def index(
    embeddings: Annotated[Path, typer.Argument(help="A file that `dmlstudy embed` wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to make.")],
    kind: Annotated[
        str, typer.Option(help="flat (exact), ivf, ivf_pq (in a fraction of the memory) or hnsw.")
    ] = "flat",
    size: SizeOption = None,
    bits: Annotated[
        Optional[int],
        typer.Option(
            "--bits",
            help="Bits of each number that is searched: 32, 8 or 1; `--bits 1`. Default: the file's.",
        ),
    ] = None,
    beside: Annotated[
        Optional[str],
        typer.Option(
            "--beside",
            help="Vectors on disk that put in order what short ones find: float (the file's; default), int8, none.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a gallery of embeddings, to be searched by `dmlstudy retrieve` and `dmlstudy serve`.

    With `--size` and `--bits` it is searched by short vectors; the first `--among` of these are then put in order by
    larger ones.
    """
    from dmlstudy.serving.gallery import build
    from dmlstudy.serving.short_search import check_beside

    kept = None if beside is None else check_beside(beside)
    gallery = build(embeddings, output, kind, size=size, bits=bits, beside=kept)  # type: ignore[arg-type]
    if json:
        facts = {name: value for name, value in gallery.facts.items() if name not in ("items", "model")}
        show_json({"folder": str(output), "num_items": len(gallery), "kind": kind, **facts})
        return
    say(f"{len(gallery)} items of size {gallery.dim} in {output} ({kind})")
    say(gallery.line)


@app.command(
    epilog="Examples: `dmlstudy retrieve model gallery query.png -k 5` ·"
    " `dmlstudy retrieve digits-embedder gallery queries/ --sheet found.html`",
)
def retrieve(
    model: Annotated[
        str,
        typer.Argument(
            help="The model the gallery was made with, registered or a folder; with --map another one."
        ),
    ],
    gallery: Annotated[Path, typer.Argument(help="A folder that `dmlstudy index` made.")],
    query: Annotated[Path, typer.Argument(help="An image, or anything else that `dmlstudy embed` takes.")],
    k: Annotated[int, typer.Option("-k", "--k", min=1, help="Items for each query.")] = 10,
    rerank: Annotated[
        str, typer.Option(help="auto (what the model has a head for), none, structure or layers.")
    ] = "auto",
    among: Annotated[
        int, typer.Option(min=1, help="Items of the index that are put in a better order.")
    ] = 100,
    map: QueryMapOption = None,
    sheet: Annotated[
        Optional[Path],
        typer.Option("--sheet", help="Also write an HTML page of pictures; no other file is replaced."),
    ] = None,
    exclude_self: Annotated[
        bool, typer.Option("--exclude-self", help="Leave out the query's own item, where the gallery has it.")
    ] = False,
    accept_at: Annotated[
        Optional[float],
        typer.Option("--accept-at", help="The least score of a match, in place of the model's threshold."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1; of the gallery's index too."),
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="As JSON, one line for each item.")] = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Find the nearest items of a gallery for each query; a smaller distance, in JSON a larger score, is nearer."""
    from dmlstudy.html import check_page
    from dmlstudy.saved.items import of_files
    from dmlstudy.serving.gallery import open_gallery
    from dmlstudy.serving.retrieve import own_items, write_contact_sheet
    from dmlstudy.serving.retrieve import retrieve as find
    from dmlstudy.serving.retriever import Retriever

    if sheet is not None:
        check_page(sheet)
    with model_at(model, store, tracking_uri, device=device) as opened:
        items = open_gallery(gallery, device=device)
        if items.note:
            print(f"note: {items.note}", file=sys.stderr)
        retriever = Retriever(
            opened, items, rerank=rerank, among=among, accept_at=accept_at, space_map=_opened_map(map)
        )
        for line in retriever.notes:
            print(f"note: {line}", file=sys.stderr)
        queries = of_files(opened, query)
        hits = find(retriever, queries, k, is_own=own_items(items, query, queries) if exclude_self else None)
        if sheet is not None:
            write_contact_sheet(sheet, retriever, queries, hits)
    if json:
        for hit in (hit for own in hits for hit in own):
            print(hit.as_json())
        return
    columns: tuple[str, ...] = ("query", "rank", "item", "label", "distance")
    rows = [
        [hit.query, str(hit.rank), hit.id, hit.label or "", f"{hit.distance:.4f}"]
        for own in hits
        for hit in own
    ]
    if retriever.acceptance is not None:
        columns += ("score", "accept")
        for row, hit in zip(rows, (hit for own in hits for hit in own), strict=True):
            row += [f"{hit.score:.4f}", "yes" if hit.accept else "no"]
    show_table(columns, rows)
    if retriever.acceptance is not None:
        for line in retriever.acceptance.lines:
            print(line, file=sys.stderr)


@app.command(
    epilog="Examples: `dmlstudy serve digits-embedder --gallery gallery` ·"
    " `dmlstudy serve model --gallery gallery --watch watch.jsonl` ·"
    " `DMLSTUDY_TOKEN=... dmlstudy serve model --host 0.0.0.0`",
)
def serve(
    model: Annotated[str, typer.Argument(help="A registered model, or a folder that was pulled.")],
    gallery: Annotated[
        Optional[Path],
        typer.Option("--gallery", help="A folder that `dmlstudy index` made, to retrieve from."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; beyond loopback a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port.")] = 8080,
    token_file: Annotated[
        Optional[Path],
        typer.Option("--token-file", help="Its first line is the token (or DMLSTUDY_TOKEN is)."),
    ] = None,
    rerank: Annotated[
        str, typer.Option(help="auto (what the model has a head for), none, structure or layers.")
    ] = "auto",
    among: Annotated[
        int, typer.Option(min=1, help="Items of the index that are put in a better order.")
    ] = 100,
    map: QueryMapOption = None,
    size: SizeOption = None,
    bits: Annotated[
        int,
        typer.Option(
            "--bits",
            help="Bits of each number that /embed answers with: 32, 8 or 1 (packed); a gallery has its; `--bits 8`.",
        ),
    ] = 32,
    accept_at: Annotated[
        Optional[float],
        typer.Option("--accept-at", help="The least score of a match, in place of the model's threshold."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1; of the gallery's index too."),
    ] = "auto",
    name: Annotated[
        Optional[str],
        typer.Option(help="What answers call the model; default: NAME/VERSION, of a folder its name."),
    ] = None,
    allowed_host: Annotated[
        Optional[list[str]],
        typer.Option(
            "--allowed-host",
            help="A further name to be asked under; on loopback only its own are. Repeatable.",
        ),
    ] = None,
    cors_origin: Annotated[
        Optional[list[str]],
        typer.Option("--cors-origin", help="Web pages that may ask, as https://example.org. Repeatable."),
    ] = None,
    watch: Annotated[
        Optional[Path],
        typer.Option(
            "--watch",
            help="Record how far queries are from their nearest items, and tell when they leave the range; a file of"
            " JSON lines, which `dmlstudy report --serving` draws.",
        ),
    ] = None,
    watch_window: Annotated[
        Optional[int], typer.Option("--watch-window", help="Queries of a window, at most. Default: 1000.")
    ] = None,
    watch_minutes: Annotated[
        Optional[float], typer.Option("--watch-minutes", help="Minutes of a window, at most. Default: 10.")
    ] = None,
    watch_reference: Annotated[
        Optional[Path],
        typer.Option(
            "--watch-reference",
            help="Queries as they should be, which set the range: anything that `dmlstudy embed` takes. Default: the"
            " gallery's own items.",
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="A line on standard error for each request.")
    ] = True,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Put a model, and a gallery, behind HTTP: POST /embed and /retrieve; GET /docs describes the bodies.

    With `--watch` the distances of queries to their nearest items are recorded, window by window, and compared with
    those that the gallery's own items, or a reference's, have.
    """
    from dmlstudy.saved import is_model
    from dmlstudy.serving import guards, server
    from dmlstudy.serving.short_search import wanted_of

    token = os.environ.get("DMLSTUDY_TOKEN") or None
    if token_file is not None:
        token = guards.read_token(token_file)
    access = guards.Access.of(host, token, allowed_host or (), cors_origin or ())
    plan = _watch_plan(watch, watch_window, watch_minutes, watch_reference)
    with ExitStack() as held:
        place = held.enter_context(server.bound(host, port))
        if not is_model(model):
            from dmlstudy.registry.models import resolve

            found = resolve(store_at(store, tracking_uri), model)  # what an alias means may change meanwhile
            model = f"{found.name}/{found.version}"
            name = name or model
        opened = held.enter_context(model_at(model, store, tracking_uri, device=device))
        service = server.Service(
            opened,
            gallery,
            guards.Limits(),
            name=name,
            rerank=rerank,
            among=among,
            accept_at=accept_at,
            short=wanted_of(opened, size, bits),
            space_map=_opened_map(map),
            watch=plan,
        )
        for line in [*service.lines, *(service.watch.lines if service.watch is not None else ())]:
            print(line, file=sys.stderr)
        if service.note:
            print(f"note: {service.note}", file=sys.stderr)
        for line in service.acceptance.lines if service.acceptance is not None else ():
            print(line, file=sys.stderr)
        say(
            f"{service.name} on http://{host}:{place.getsockname()[1]} (/docs tells how to ask; Ctrl-C ends it)"
        )
        server.serve(service, place, access, is_logged=access_log)


def _watch_plan(
    file: Path | None, window: int | None, minutes: float | None, reference: Path | None
) -> WatchPlan | None:
    """The plan of `--watch`. Raises ValueError for its other options without it."""
    from dmlstudy.serving.watch import WatchPlan

    given = {"--watch-window": window, "--watch-minutes": minutes, "--watch-reference": reference}
    if file is None:
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option}: says how queries are watched; name the file with --watch")
        return None
    default = WatchPlan(file)
    return WatchPlan(
        file,
        default.window if window is None else window,
        default.seconds if minutes is None else 60 * minutes,
        reference,
    ).checked()


def _opened_map(folder: Path | None) -> SpaceMap | None:
    from dmlstudy.saved.space_map import SpaceMap

    return None if folder is None else SpaceMap.open(folder)


def _decision_facts(decision: Decision) -> dict[str, Any]:
    return {**decision.model_dump(mode="json"), "is_promoted": decision.is_promoted}


def _show_decision(decision: Decision, name: str, json: bool, beside: Beside | None = None) -> None:
    from dmlstudy.registry import promotion

    if json:
        more = {} if beside is None else {"compatibility": beside.facts}
        show_json({"model": name, **_decision_facts(decision), **more})
        return
    say(promotion.said(decision, name))
    for line in [] if beside is None else beside.lines:
        say(line)
