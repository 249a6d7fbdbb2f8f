"""Commands that define, run, watch, stop and remove studies."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from dmlstudy.cli.app import (
    DEFAULT_STORE,
    AddressOption,
    ClusterOption,
    JobOption,
    JsonOption,
    PatienceOption,
    QuietOption,
    ServerOption,
    SetOption,
    StoreOption,
    app,
    end_interrupted,
    model_at,
    store_at,
)
from dmlstudy.cli.tables import WIDTH, console, say, show_json, show_leaderboard, show_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from dmlstudy.spec.study_file import StudySpec
    from dmlstudy.store import Store
    from dmlstudy.studies.near_duplicates import NearDuplicates
    from dmlstudy.training.interface import TrialData


@app.command(epilog="Example: `dmlstudy run search_spaces/studies/digits.yaml`")
def run(
    spec: Annotated[Path, typer.Argument(help="The study file.")],
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
    tracking_timeout: PatienceOption = None,
    address: ClusterOption = None,
    name: Annotated[Optional[str], typer.Option("--name", help="Another name for the study.")] = None,
    assignments: SetOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a study to its verdict; run it again to continue one that was interrupted."""
    from dmlstudy.spec import study_file as specs

    study = specs.load(spec, name, assignments or ())
    _run(study, store_at(store, tracking_uri, tracking_timeout), address, quiet)


@app.command(epilog="Example: `dmlstudy resume digits`")
def resume(
    study: Annotated[str, typer.Argument(help="A study of the store that was interrupted or has crashed.")],
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
    tracking_timeout: PatienceOption = None,
    address: ClusterOption = None,
    quiet: QuietOption = False,
) -> None:
    """Go on with a study as the store keeps it; no study file is needed. A finished one is only shown."""
    from dmlstudy.studies.resume import resume as resumed

    spec, place = resumed(store_at(store, tracking_uri, tracking_timeout), study)
    _run(spec, place, address, quiet)


@app.command(
    epilog="Example: `dmlstudy submit search_spaces/studies/digits.yaml --address http://127.0.0.1:8265 --wait`",
)
def submit(
    spec: Annotated[Path, typer.Argument(help="The study file.")],
    address: Annotated[str, typer.Option("--address", help="The cluster, as http://HOST:8265.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job's progress to its end.")] = False,
    store: Annotated[
        Optional[Path],
        typer.Option(
            "--store",
            envvar="DMLSTUDY_STORE",
            help="The store's path on the cluster; needed if it is remote.",
        ),
    ] = None,
    tracking_uri: ServerOption = None,
    tracking_timeout: PatienceOption = None,
    name: Annotated[Optional[str], typer.Option("--name", help="Another name for the study.")] = None,
    assignments: SetOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Send a study to a Ray cluster as a job, with this package's code; prints the job id.

    The first line is `job ID`; nothing else is printed before it.
    """
    from dmlstudy.spec import study_file as specs

    study = specs.load(spec, name, assignments or ())
    from dmlstudy.engine import jobs

    job = jobs.submit(study, address, store or DEFAULT_STORE, tracking_uri, tracking_timeout)
    if json:
        show_json({"job": job, "study": study.name, "address": address})
    elif not quiet:
        print(f"job {job}", flush=True)
    if wait:
        raise typer.Exit(jobs.follow_job(job, address, _written_off if json or quiet else sys.stdout.write))
    if not (json or quiet):
        print(f"follow it: {shlex.join(['dmlstudy', 'logs', '--job', job, '--address', address, '-f'])}")


@app.command(
    epilog="Examples: `dmlstudy status` · `dmlstudy status digits` · `dmlstudy status digits --json`",
)
def status(
    study: Annotated[
        Optional[str], typer.Argument(help="A study, to see it closely; default: all of the store's.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON: one study, or a list of all.")] = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
    address: AddressOption = None,
    job: JobOption = None,
) -> None:
    """State of studies: trials by state and family, best so far, throughput, estimated end.

    With `--address` the state of a cluster's jobs, or with `--job` of one of them.
    """
    if job:
        from dmlstudy.engine import jobs

        state = jobs.job(job, address)
        if json:
            show_json(state.model_dump(mode="json"))
            return
        for line in jobs.job_lines(state):
            print(line)
        return
    if address:
        if study:
            raise ValueError(
                f"--address {address} has jobs, not studies: name one with --job, or leave --address away and name"
                " the study's --store"
            )
        _show_jobs(address, json)
        return
    from dmlstudy.studies import status as of_studies

    found = of_studies.statuses(store_at(store, tracking_uri), study)
    if json:
        texts = [one.model_dump_json(indent=1) for one in found]
        print(texts[0] if study else f"[{', '.join(texts)}]")
        return
    if not found:
        print(f"no studies in the store {store}; start one with `dmlstudy run`")
        return
    show_table(
        ("study", "state", "finished", "stopped early", "failed", "left", "best", "time"),
        [of_studies.status_row(one) for one in found],
    )
    for one in found:
        for note in one.notes:
            say(f"{one.study}: {note}")
    if study:
        console.print()
        show_table(
            ("family", "waiting", "running", "finished", "stopped early", "failed", "judged", "best"),
            of_studies.family_rows(found[0]),
        )
        for line in of_studies.status_lines(found[0]):
            say(line)


@app.command(
    epilog="Examples: `dmlstudy logs digits` · `dmlstudy logs digits --trial 5` · `dmlstudy logs digits --engine`",
)
def logs(
    study: Annotated[Optional[str], typer.Argument(help="A study of the store.")] = None,
    trial: Annotated[
        Optional[int], typer.Option("--trial", help="What is known of the trial with this number.")
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="The engines' log instead of the progress.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the study ends.")] = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
    address: AddressOption = None,
    job: JobOption = None,
) -> None:
    """A study's progress lines, the engines' log, or everything about one trial."""
    from dmlstudy.studies import logs as of_studies

    if trial is not None:
        _only_in_a_store(job, "what is known of a trial")
        for line in of_studies.trial_log(store_at(store, tracking_uri), study, trial):
            print(line)
    elif job:
        from dmlstudy.engine import jobs

        jobs.job_logs(job, address, sys.stdout.write, follow=follow)
    else:
        of_studies.logs(store_at(store), study, sys.stdout.write, engine=engine, follow=follow)


@app.command(
    epilog="Examples: `dmlstudy stop digits` · `dmlstudy stop digits --trial 5`",
)
def stop(
    study: Annotated[Optional[str], typer.Argument(help="A study of the store.")] = None,
    trial: Annotated[
        Optional[int], typer.Option("--trial", help="End only the running trial with this number.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    job: JobOption = None,
    json: JsonOption = False,
) -> None:
    """End a running study, or one running trial of it; what is finished is kept, and `resume` continues it.

    If nothing runs it says so, with exit code 1.
    """
    from dmlstudy.studies.stop import stop as stop_study
    from dmlstudy.studies.stop import stop_trial

    is_running = job is not None or study is None or store_at(store).driver(study) is not None
    if trial is not None:
        _only_in_a_store(job, "a trial is ended through its study's folder; it")
        message = stop_trial(store_at(store), study, trial)
    elif job:
        from dmlstudy.engine import jobs

        message = jobs.stop_job(job, address)
    else:
        message = stop_study(store_at(store), study)
    if json:
        show_json({"study": study, "trial": trial, "job": job, "was_running": is_running, "message": message})
    else:
        say(message)
    if not is_running:
        raise typer.Exit(1)


@app.command(
    epilog="Examples: `dmlstudy jobs --address http://127.0.0.1:8265` ·"
    " `dmlstudy jobs --address http://127.0.0.1:8265 --json`",
)
def jobs(
    address: Annotated[str, typer.Option("--address", help="The cluster, as http://HOST:8265.")],
    json: JsonOption = False,
) -> None:
    """The jobs of a cluster that `submit` sent: id, study, state, when it began and how long it has run."""
    _show_jobs(address, json)


@app.command(
    epilog="Examples: `dmlstudy validate search_spaces/studies/digits.yaml` ·"
    " `dmlstudy validate study.yaml --no-estimate --set 'protocol.verdict_seeds={from: 3, to: 10}'` ·"
    " `dmlstudy validate study.yaml --no-estimate --near-duplicates --near-model birds/2`",
)
def validate(
    spec: Annotated[Path, typer.Argument(help="The study file.")],
    estimate: Annotated[
        bool, typer.Option(help="Time a few training steps to estimate the duration.")
    ] = True,
    assignments: SetOption = None,
    near: Annotated[
        bool,
        typer.Option(
            "--near-duplicates",
            help="Look for test images that are nearly one of development: resized, recompressed. Reads all images.",
        ),
    ] = False,
    near_model: Annotated[
        Optional[str],
        typer.Option(
            "--near-model",
            help="Compare embeddings of this model, a folder or NAME/VERSION; default: small grey images.",
        ),
    ] = None,
    near_threshold: Annotated[
        Optional[float],
        typer.Option(
            "--near-threshold",
            help="Cosine from which images are told, as 0.9; default: 0.98, with a model 0.95.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Check a study without running it: its data, the tree of its space, its trials, what differences its verdict can
    see, the time it will take.

    The store is needed where embedder.weights names a registered model; and an earlier verdict there on the same data
    says best how much scores vary.
    """
    if not near and (near_model is not None or near_threshold is not None):
        raise ValueError(
            "--near-model and --near-threshold are of --near-duplicates; add it, or leave them out"
        )
    from dmlstudy.spec import study_file as specs

    study = specs.load(spec, assignments=assignments or ())
    from dmlstudy.studies import checks, pilots, starts
    from dmlstudy.studies.estimate import describe, facts

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    dataset = checks.check_parts(study)
    found = starts.present(study, dataset)
    place = store_at(store, tracking_uri)
    pilot = pilots.best_pilot(place, study, dataset)
    found_near = _near_duplicates(dataset, near_model, near_threshold, place, tell) if near else None
    with starts.looked_at(study, place, found) as told:
        if json:
            known = facts(study, dataset, measure=estimate, pilot=pilot, tell=tell)
            known["notes"] += told
            if found_near is not None:
                known["near_duplicates"] = found_near.facts()
            print(dumps(known, indent=1))
            return
        tree = Tree(f"[bold]{escape(study.name)}[/]")
        for family in study.families.values():
            branch = tree.add(f"[bold]{escape(family.name)}[/] ({escape(family.paper)})")
            for line in study.tree(family.name):
                branch.add(escape(line))
        console.print(tree, highlight=False)
        for line in [*told, *describe(study, dataset, measure=estimate, pilot=pilot, tell=tell)]:
            say(line)
        if found_near is not None:
            _show_near(found_near, study.data.path)


def _near_duplicates(
    dataset: TrialData,
    reference: str | None,
    threshold: float | None,
    place: Store,
    tell: Callable[[str], object],
) -> NearDuplicates:
    from dmlstudy.studies.near_duplicates import near_duplicates

    if reference is None:
        return near_duplicates(dataset, threshold, tell=tell)
    with model_at(reference, place.root, place.server) as model:
        return near_duplicates(dataset, threshold, model, tell)


MOST_NEAR = 20
"""Pairs of near-duplicates that are shown; ``--json`` has all."""


def _show_near(found: NearDuplicates, root: str | None) -> None:
    below = f"{root}/".replace("//", "/") if root else ""
    for line in found.lines():
        say(line)
    shown = found.pairs[:MOST_NEAR]
    if shown:
        rows = [
            (
                f"{pair.similarity:.4f}",
                pair.test.removeprefix(below),
                pair.test_class,
                pair.development.removeprefix(below),
                pair.development_class,
            )
            for pair in shown
        ]
        show_table(("similarity", "test", "of class", "development", "of class"), rows)
    if len(found.pairs) > len(shown):
        say(f"{len(found.pairs) - len(shown)} pairs more; --json has all")


@app.command(
    epilog="Examples: `dmlstudy init pictures` · `dmlstudy init pictures -o birds.yaml --budget quick`",
)
def init(
    folder: Annotated[
        Path, typer.Argument(help="A sub-folder of pictures for each class, or train and test with such.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The study file to write.")] = Path(
        "study.yaml"
    ),
    name: Annotated[
        Optional[str], typer.Option("--name", help="The study's name; default: the folder's.")
    ] = None,
    image_size: Annotated[
        Optional[int],
        typer.Option(
            "--image-size", min=8, max=4096, help="Pixels of a side; default: the pictures', 28 to 64."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", help="quick (minutes), standard, or thorough (as for a paper).")
    ] = "standard",
    json: JsonOption = False,
) -> None:
    """Write a study file for a folder of pictures, with a batch and folds that go with its number of classes."""
    from dmlstudy.studies import first_study
    from dmlstudy.studies.wall_time import this_machine

    written = first_study.write(
        folder.expanduser(),
        output.expanduser(),
        name=name,
        image_size=image_size,
        budget=budget,
        machine=this_machine(),
    )
    if json:
        classes = {"development": len(written.folder.own_C), "test": len(written.folder.test_C)}
        pictures = {"development": sum(written.folder.own_C), "test": sum(written.folder.test_C)}
        show_json(
            {"file": str(output), "study": written.name, "num_classes": classes, "num_images": pictures}
        )
        return
    say(
        f"{output}: study {written.name}, {written.folder.words}\n"
        f"next: dmlstudy validate {output}   dmlstudy run {output}"
    )


@app.command(epilog="Examples: `dmlstudy families` · `dmlstudy families pair_weighting`")
def families(
    name: Annotated[Optional[str], typer.Argument(help="Show this family's search space.")] = None,
    json: JsonOption = False,
) -> None:
    """The loss families that can be searched, with their paper and parameters."""
    from dmlstudy.spec import study_file as specs

    if json:
        facts = []
        for family in [name] if name else specs.family_files():
            paper, space = specs.read_family(family, "family")
            parameters, tree = specs.parameters(space), specs.tree(space)
            facts.append({"family": family, "source": paper, "parameters": parameters, "space": tree})
        show_json(facts)
        return
    table = Table("family", "source", "parameters" if name is None else "search space", box=None)
    for family in [name] if name else specs.family_files():
        paper, space = specs.read_family(family, "family")
        lines = specs.parameters(space) if name is None else specs.tree(space)
        table.add_row(family, escape(paper), "\n".join(map(escape, lines)))
    console.print(table, highlight=False)


@app.command(
    epilog="Examples: `dmlstudy options` · `dmlstudy options training` · `dmlstudy options search --json`",
)
def options(
    section: Annotated[
        Optional[str], typer.Argument(help="Only this section of a study file, as training or search.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, a list.")] = False,
) -> None:
    """Every key of a study file: its values, default and meaning.

    `*`: a search may choose it if a domain stands in place of the value. A loss has the keys that `families` lists.
    """
    from dmlstudy.spec import options as keys

    found = keys.options(section)
    if json:
        print(f"[{', '.join(option.model_dump_json() for option in found)}]")
        return
    show_table(
        ("key", "values", "default", "meaning"),
        [
            (f"{option.key}{' *' * option.is_searchable}", option.values, option.default, option.description)
            for option in found
        ],
    )


@app.command(
    epilog="Examples: `dmlstudy selfcheck` · "
    "`dmlstudy selfcheck proxy_anchor margin --workers 4 --cpus-per-worker 0.5`",
)
def selfcheck(
    losses: Annotated[
        Optional[list[str]], typer.Argument(help="Only these losses and regularisers; default: all.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers that share a batch.")] = 2,
    cpus_per_worker: Annotated[float, typer.Option(help="CPUs each worker takes.")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(help="GPUs each worker takes.")] = 0.0,
    address: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Check on your cluster and devices that several workers find exactly the gradient of one.

    Each loss, regulariser and memory takes a training step on equal and on ragged shares of a batch, in float64.
    `cosine` and `norm ratio` compare the gradients of encoder and loss with those of one process: both must be 1.
    """
    from dataclasses import asdict

    from pydantic import ValidationError

    from dmlstudy.engine.progress import terminal
    from dmlstudy.engine.selfcheck import SelfcheckFailed, case_names, run_selfcheck
    from dmlstudy.records import ResourcesConfig
    from dmlstudy.training.exactness import Finding

    names = case_names(losses or [])
    try:
        resources = ResourcesConfig(
            workers=workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None
    width = max(map(len, names))
    findings: list[Finding] = []
    failed: str | None = None
    with terminal() as stream:

        def tell(line: str) -> None:
            if not json:
                print(line, file=stream)

        def hear(finding: Finding) -> None:
            findings.append(finding)
            verdict = "exact" if finding.is_exact else f"WRONG by {finding.error:.1e}"
            tell(
                f"{finding.case:<{width}}  {finding.value:>12.6g}  {finding.value_error:>11.1e}"
                f"  {finding.cosine:>12.10f}  {finding.norm_ratio:>12.10f}  {verdict}"
            )

        tell(f"{len(names)} cases on {workers} workers; starting them takes half a minute")
        tell(
            f"{'loss':<{width}}  {'value':>12}  {'value error':>11}  {'cosine':>12}  {'norm ratio':>12}  verdict"
        )
        try:
            run_selfcheck(
                names, resources, address=address, on_finding=hear, tell=partial(print, file=stream)
            )
        except SelfcheckFailed as error:
            failed = str(error)
    wrong = [finding.case for finding in findings if not finding.is_exact]
    if json:
        cases = [asdict(finding) | {"is_exact": finding.is_exact} for finding in findings]
        show_json({"workers": workers, "failed": failed, "wrong": wrong, "cases": cases})
    elif failed:
        console.print(f"[red]failed[/]: {escape(failed)}", soft_wrap=True)
    elif wrong:
        console.print(f"[red]{len(wrong)} of {len(names)} are wrong[/]: {escape(', '.join(wrong))}")
    else:
        say(f"all {len(names)} are exact on {workers} workers")
    if failed or wrong:
        raise typer.Exit(1)


@app.command(
    epilog="Examples: `dmlstudy delete digits` · `dmlstudy delete digits --yes --models`",
)
def delete(
    study: Annotated[str, typer.Argument(help="A study of the store.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    models: Annotated[
        bool, typer.Option("--models", help="Also if a model of it is in use: champion or challenger.")
    ] = False,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Delete a study for good: its runs, registered versions, search, artifacts and folder; not while it runs.

    Killed in between it is called again. On an MLflow server runs are marked as deleted, for `mlflow gc`.
    """
    from dmlstudy.studies import cleanup

    place = store_at(store, tracking_uri)
    there = cleanup.extent(place, study)
    what = ", ".join(
        (
            f"{there.num_runs} runs",
            f"{there.num_trials} trials",
            f"{cleanup.bytes_told(there.num_bytes)} of files",
            f"the registered {' '.join(there.versions)}" if there.versions else "no registered model",
        )
    )
    if there.searches:
        what += f", with its searches done again: {', '.join(there.searches)}"
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError(f"study {study!r} has {what}; delete it with --yes")
        typer.confirm(f"delete {study} with {what}?", abort=True)
    deleted = cleanup.delete(place, study, with_models=models)
    if json:
        show_json(deleted.model_dump(mode="json"))
    else:
        print(f"deleted {study}: {what}")


@app.command(
    epilog="Example: after `cp -r dmlstudy_store backup` do `dmlstudy relocate --store backup`",
)
def relocate(json: JsonOption = False, store: StoreOption = DEFAULT_STORE) -> None:
    """Make a store that was moved or copied look for its artifacts in its own folder; not while a study runs there.

    A copy is a store of its own then: it can be read, and its studies go on, without the store that it was copied from.
    """
    from dmlstudy.registry import artifact_places

    place = store_at(store)
    before = artifact_places.relocate(place)
    if json:
        show_json({"store": str(place.root), "was_at": None if before is None else str(before)})
        return
    print(f"{place.root}: {'is in its place' if before is None else f'no longer looks in {before}'}")


@app.command(
    epilog="Examples: `dmlstudy prune --dry-run` · `dmlstudy prune --older-than 1d --also models/ --parts`",
)
def prune(
    older_than: Annotated[
        str, typer.Option("--older-than", help="Only what nobody has written to for so long, as 12h or 7d.")
    ] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    also: Annotated[
        Optional[list[Path]],
        typer.Option(
            "--also", help="A folder in which a command may have left something, this one by default."
        ),
    ] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="There also the parts from which an `embed` could go on.")
    ] = False,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Delete what killed commands have left: drafts, states of ended trials, runs deleted on MLflow's page."""
    from dmlstudy.studies import cleanup

    seconds = cleanup.age(older_than)
    found = cleanup.prune(store_at(store), seconds, dry_run=dry_run, also=also or [Path()], with_parts=parts)
    if json:
        show_json([each.model_dump(mode="json") for each in found])
        return
    for each in found:
        print(f"{each.what}: {each.path} ({cleanup.bytes_told(each.num_bytes)})")
    total = cleanup.bytes_told(sum(each.num_bytes for each in found))
    print(f"{'would free' if dry_run else 'freed'} {total} in {len(found)} places")


def _run(study: StudySpec, place: Store, address: str | None, quiet: bool = False) -> None:
    """Run a study, or what is left of it, with its progress on the terminal."""
    from dmlstudy.engine.interruption import StudyInterrupted
    from dmlstudy.engine.progress import as_long_as_heard, terminal
    from dmlstudy.studies.conclude import StudyFailed
    from dmlstudy.studies.run import run_study

    width = None if console.is_terminal else WIDTH
    if not quiet:
        _say_notes(study)
    again = place.command("resume", study.name)
    try:
        with terminal() as stream:
            tell = Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=True).print
            board = run_study(
                study, place, address=address, tell=_written_off if quiet else as_long_as_heard(tell)
            )
    except StudyInterrupted:
        end_interrupted(f"`{again}`")
    except StudyFailed as error:
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from None
    if quiet:
        return
    show_leaderboard(board)
    log = place.command("logs", study.name, "--engine")
    say(
        f"models: {place.command('models')}\nMLflow's page: {place.command('ui')}\nwhat the engines said: {log}"
    )


def _say_notes(study: StudySpec) -> None:
    for note in study.notes:
        print(f"note: {note}", file=sys.stderr)


def _written_off(_: str) -> None:
    """Drops a line that is not to be seen."""


def _show_jobs(address: str, json: bool) -> None:
    from dmlstudy.engine import jobs

    listed = jobs.jobs(address)
    if json:
        show_json([job.model_dump(mode="json") for job in listed])
    elif not listed:
        print(
            f"no jobs at {address}; send one with `dmlstudy submit STUDY.yaml --address {shlex.quote(address)}`"
        )
    else:
        show_table(("job", "study", "state", "began", "time"), [jobs.job_row(job) for job in listed])


def _only_in_a_store(job: str | None, what: str) -> None:
    if job:
        raise ValueError(
            f"{what} is in the store, which a job's cluster alone does not give: leave --job away, name the"
            " study and --store, on a machine that sees the store's folder"
        )
