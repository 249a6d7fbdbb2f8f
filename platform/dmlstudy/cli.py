"""The command line: names things, holds no logic. Heavy imports wait until a command needs them."""

from __future__ import annotations

import errno
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from dmlstudy.text import nearest, one_line

if TYPE_CHECKING:
    from dmlstudy.registry.leaderboard import Leaderboard
    from dmlstudy.registry.promotion import Decision
    from dmlstudy.spec.study_file import StudySpec
    from dmlstudy.store import Store

app = typer.Typer(
    help="Hyperparameter studies for deep metric learning on Ray: run, compare, register, pull, use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done · 1 a study or job failed, or what was asked for is not so (a champion that stays, a"
    " study that does not run) · 2 wrong input, or a store or cluster that cannot be used, in one line ·"
    " 130 interrupted by Ctrl-C.",
)
SCORES = ("recall_at_1", "map_at_r", "macro_f1", "accuracy", "map")
"""Metrics of which two are shown of a model, and one beside a study's objective; the first that there are."""
WIDTH = 150  # of what is not shown on a terminal
console = Console()
if not console.is_terminal:
    console = Console(width=WIDTH)

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
        help="Seconds a running study waits for an MLflow server that is away; then it stops, to be resumed."
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
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
DEFAULT_STORE = Path("dmlstudy_store")
LONGEST_ERROR = 1000
"""Characters of an error's line; what is longer loses its middle, for the advice stands at its end."""
ENGINES = ("mlflow", "optuna", "ray", "sqlalchemy")
"""Libraries of which an error that nobody has foreseen is one line as well."""


def main() -> None:
    """Run the command line; wrong input and what the machine refuses are one line and exit code 2."""
    try:
        try:
            code = app(prog_name="dmlstudy", standalone_mode=False)
        finally:
            sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.Abort:
        print("aborted", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # who read it has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        line = _error_line(error)
        if line is None or os.environ.get("DMLSTUDY_DEBUG"):
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def _error_line(error: Exception) -> str | None:
    """What to tell people of an error, in one line; None of one that is a mistake of this program."""
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
    """What Typer says of a command line that it does not take, with the nearest option and where to read more."""
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


def _show_version(is_wished: bool) -> None:
    if is_wished:
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
    _run(study, _store(store, tracking_uri, tracking_timeout), address, quiet)


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

    spec, place = resumed(_store(store, tracking_uri, tracking_timeout), study)
    _run(spec, place, address, quiet)


@app.command(
    epilog="Example: `dmlstudy submit search_spaces/studies/digits.yaml --address http://127.0.0.1:8265 --wait`"
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
        _show_json({"job": job, "study": study.name, "address": address})
    elif not quiet:
        print(f"job {job}", flush=True)
    if wait:
        raise typer.Exit(jobs.follow_job(job, address, _written_off if json or quiet else sys.stdout.write))
    if not (json or quiet):
        print(f"follow it: {shlex.join(['dmlstudy', 'logs', '--job', job, '--address', address, '-f'])}")


@app.command(
    epilog="Examples: `dmlstudy status` · `dmlstudy status digits` · `dmlstudy status digits --json`"
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
    """What studies are doing: trials by state and family, best so far, throughput, estimated end.

    With `--address` what the jobs of a cluster are doing, or with `--job` one of them.
    """
    if job:
        from dmlstudy.engine import jobs

        state = jobs.job(job, address)
        if json:
            _show_json(state.model_dump(mode="json"))
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

    found = of_studies.statuses(_store(store, tracking_uri), study)
    if json:
        texts = [one.model_dump_json(indent=1) for one in found]
        print(texts[0] if study else f"[{', '.join(texts)}]")
        return
    if not found:
        print(f"no studies in the store {store}; start one with `dmlstudy run`")
        return
    _show_table(
        ("study", "state", "finished", "stopped early", "failed", "left", "best", "time"),
        [of_studies.status_row(one) for one in found],
    )
    for one in found:
        for note in one.notes:
            console.print(f"{one.study}: {escape(note)}", highlight=False, soft_wrap=True)
    if study:
        console.print()
        _show_table(
            ("family", "waiting", "running", "finished", "stopped early", "failed", "judged", "best"),
            of_studies.family_rows(found[0]),
        )
        for line in of_studies.status_lines(found[0]):
            console.print(escape(line), highlight=False, soft_wrap=True)


@app.command(
    epilog="Examples: `dmlstudy logs digits` · `dmlstudy logs digits --trial 5` · `dmlstudy logs digits --engine`"
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
    """A study's progress lines, what the engines said, or all about one trial."""
    from dmlstudy.studies import logs as of_studies

    if trial is not None:
        _only_in_a_store(job, "what is known of a trial")
        for line in of_studies.trial_log(_store(store, tracking_uri), study, trial):
            print(line)
    elif job:
        from dmlstudy.engine import jobs

        jobs.job_logs(job, address, sys.stdout.write, follow=follow)
    else:
        of_studies.logs(_store(store), study, sys.stdout.write, engine=engine, follow=follow)


@app.command(epilog="Examples: `dmlstudy stop digits` · `dmlstudy stop digits --trial 5`")
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
    """End a running study, or one running trial of it; what is finished is kept, and `resume` goes on.

    Of what does not run it says so, with exit code 1.
    """
    from dmlstudy.studies.stop import stop as stop_study
    from dmlstudy.studies.stop import stop_trial

    is_running = job is not None or study is None or _store(store).driver(study) is not None
    if trial is not None:
        _only_in_a_store(job, "a trial is ended through its study's folder; it")
        message = stop_trial(_store(store), study, trial)
    elif job:
        from dmlstudy.engine import jobs

        message = jobs.stop_job(job, address)
    else:
        message = stop_study(_store(store), study)
    if json:
        _show_json(
            {"study": study, "trial": trial, "job": job, "was_running": is_running, "message": message}
        )
    else:
        console.print(escape(message), highlight=False, soft_wrap=True)
    if not is_running:
        raise typer.Exit(1)


@app.command(
    epilog="Examples: `dmlstudy jobs --address http://127.0.0.1:8265` ·"
    " `dmlstudy jobs --address http://127.0.0.1:8265 --json`"
)
def jobs(
    address: Annotated[str, typer.Option("--address", help="The cluster, as http://HOST:8265.")],
    json: JsonOption = False,
) -> None:
    """The jobs of a cluster that `submit` sent: id, study, state, when it began and how long it has run."""
    _show_jobs(address, json)


@app.command(epilog="Example: `dmlstudy validate search_spaces/studies/digits.yaml`")
def validate(
    spec: Annotated[Path, typer.Argument(help="The study file.")],
    estimate: Annotated[
        bool, typer.Option(help="Time a few training steps to estimate the duration.")
    ] = True,
    assignments: SetOption = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check a study without running it: its data, the tree of its space, its trials, the time it will take."""
    from dmlstudy.spec import study_file as specs

    study = specs.load(spec, assignments=assignments or ())
    from dmlstudy.studies import checks
    from dmlstudy.studies.estimate import describe, facts

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    dataset = checks.check_parts(study)
    if json:
        print(dumps(facts(study, dataset, measure=estimate, tell=tell), indent=1))
        return
    tree = Tree(f"[bold]{escape(study.name)}[/]")
    for family in study.families.values():
        branch = tree.add(f"[bold]{escape(family.name)}[/] ({escape(family.paper)})")
        for line in family.tree():
            branch.add(escape(line))
    console.print(tree, highlight=False)
    for line in describe(study, dataset, measure=estimate, tell=tell):
        console.print(escape(line), highlight=False, soft_wrap=True)


@app.command(
    epilog="Examples: `dmlstudy init pictures` · `dmlstudy init pictures -o birds.yaml --budget quick`"
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
        _show_json(
            {"file": str(output), "study": written.name, "num_classes": classes, "num_images": pictures}
        )
        return
    console.print(
        f"{output}: study {written.name}, {written.folder.words}\n"
        f"next: dmlstudy validate {output}   dmlstudy run {output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
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
        _show_json(facts)
        return
    table = Table("family", "source", "parameters" if name is None else "search space", box=None)
    for family in [name] if name else specs.family_files():
        paper, space = specs.read_family(family, "family")
        lines = specs.parameters(space) if name is None else specs.tree(space)
        table.add_row(family, escape(paper), "\n".join(map(escape, lines)))
    console.print(table, highlight=False)


@app.command(
    epilog="Examples: `dmlstudy options` · `dmlstudy options training` · `dmlstudy options search --json`"
)
def options(
    section: Annotated[
        Optional[str], typer.Argument(help="Only this section of a study file, as training or search.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, a list.")] = False,
) -> None:
    """Every key of a study file: what may stand there, its default, and what it means.

    `*`: a search may choose it, where a domain stands instead of a value. A loss has the keys that `families` lists.
    """
    from dmlstudy.spec import options as keys

    found = keys.options(section)
    if json:
        print(f"[{', '.join(option.model_dump_json() for option in found)}]")
        return
    _show_table(
        ("key", "values", "default", "meaning"),
        [
            (f"{option.key}{' *' * option.is_searchable}", option.values, option.default, option.description)
            for option in found
        ],
    )


@app.command(
    epilog="Examples: `dmlstudy selfcheck` · `dmlstudy selfcheck proxy_anchor margin --workers 4 --cpus-per-worker 0.5`"
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
        _show_json({"workers": workers, "failed": failed, "wrong": wrong, "cases": cases})
    elif failed:
        console.print(f"[red]failed[/]: {escape(failed)}", soft_wrap=True)
    elif wrong:
        console.print(f"[red]{len(wrong)} of {len(names)} are wrong[/]: {escape(', '.join(wrong))}")
    else:
        console.print(f"all {len(names)} are exact on {workers} workers", highlight=False)
    if failed or wrong:
        raise typer.Exit(1)


@app.command(
    epilog="Examples: `dmlstudy leaderboard digits` · `dmlstudy leaderboard digits --json` ·"
    " `dmlstudy leaderboard digits --format parquet -o digits.parquet` ·"
    " `dmlstudy leaderboard cifar10-online fashion-online --against oahu`"
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
    boards = [read(_store(store, tracking_uri), study) for study in studies]
    if against is not None:
        _show_tally(boards, against, as_json=format == "json")
        return
    if len(boards) > 1:
        raise ValueError(
            "several studies have no common leaderboard; --against FAMILY counts its wins over them"
        )
    if output is not None:
        from dmlstudy.registry import leaderboard_file

        leaderboard_file.write(boards[0], output, format)
        console.print(f"{output}: {len(boards[0].rows)} families", highlight=False, soft_wrap=True)
    elif format == "json":
        print(boards[0].model_dump_json(indent=1))
    elif format == "csv":
        from dmlstudy.registry import leaderboard_file

        sys.stdout.write(leaderboard_file.csv_text(boards[0]))
    else:
        _show_leaderboard(boards[0])


@app.command(epilog="Example: `dmlstudy curves cifar10-online -o curves.html`")
def curves(
    study: Annotated[str, typer.Argument(help="A study of the store.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML page to write.")] = Path(
        "curves.html"
    ),
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Draw a study of online learners: error against constraints, and how the weights of layers evolve."""
    from dmlstudy.report.streams import write_curves

    families = write_curves(_store(store, tracking_uri), study, output)
    if json:
        _show_json({"file": str(output), "study": study, "families": families})
        return
    console.print(f"{output}: {len(families)} families ({', '.join(families)})", highlight=False)


@app.command(
    epilog="Examples: `dmlstudy report digits` · `dmlstudy report digits -o digits.html --without-examples`"
)
def report(
    study: Annotated[str, typer.Argument(help="A study of the store, finished or not.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML page to write.")] = Path(
        "report.html"
    ),
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

    place = _store(store, tracking_uri)
    written = write_report(place, study, output, with_examples=not without_examples)
    if json:
        _show_json({"file": str(output), **written._asdict()})
        return
    kept = (
        f"not kept with the study's run: {written.not_kept}"
        if written.not_kept
        else "kept with the study's run too"
    )
    size = output.stat().st_size / 1e6
    console.print(
        escape(f"{output}: {written.num_families} families, {size:.1f} MB with all it needs; {kept}"),
        highlight=False,
        soft_wrap=True,
    )
    if written.notice:
        console.print(f"not finished: {escape(written.notice)}", highlight=False, soft_wrap=True)


@app.command(epilog="Examples: `dmlstudy models` · `dmlstudy models digits-embedder`")
def models(
    name: Annotated[
        Optional[str], typer.Argument(help="Only this model, and what was decided on its versions.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """The registered models, with two of their scores on the test classes or rows."""
    from dmlstudy.registry import promotion
    from dmlstudy.registry.models import versions

    place = _store(store, tracking_uri)
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
        _show_json({"versions": versions_of, **history})
        return
    table = Table("model", "version", "alias", "study", "family", "test scores", box=None)
    for version in listed:
        shown = [metric for metric in SCORES if f"test_{metric}" in version.metrics][:2]
        table.add_row(
            version.name,
            str(version.version),
            ", ".join(version.aliases),
            version.study,
            version.family,
            ", ".join(f"{metric} {version.metrics[f'test_{metric}']:.4f}" for metric in shown),
        )
    console.print(table, highlight=False)
    for decision in promotion.history(place, name) if name is not None else []:
        console.print(
            escape(f"{decision.at}  {promotion.said(decision, name or '')}"), highlight=False, soft_wrap=True
        )


@app.command(
    epilog="Examples: `dmlstudy promote digits-embedder@challenger` ·"
    " `dmlstudy promote digits-embedder/2 --anyway 'half the size'`"
)
def promote(
    model: Annotated[str, typer.Argument(help="NAME@ALIAS or NAME/VERSION.")],
    anyway: Annotated[
        Optional[str], typer.Option("--anyway", help="Promote without a comparison, for this reason.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Put a version in use, if the paired comparison with the champion says better; else the champion stays."""
    from dmlstudy.registry import promotion

    decision = promotion.promote(_store(store, tracking_uri), model, anyway)
    _show_decision(decision, model.partition("@")[0].partition("/")[0], json)
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

    decision = promotion.rollback(_store(store, tracking_uri), name)
    _show_decision(decision, name, json)


@app.command(epilog="Example: `dmlstudy compare digits-embedder/1 digits-embedder/2`")
def compare(
    first: Annotated[str, typer.Argument(help="NAME, NAME@ALIAS or NAME/VERSION.")],
    second: Annotated[str, typer.Argument(help="Another one, judged on the same test data.")],
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Compare two registered versions by the verdict seeds that both families have."""
    from dmlstudy.registry import promotion

    comparison = promotion.compared(_store(store, tracking_uri), first, second)
    if json:
        _show_json(comparison.model_dump(mode="json"))
        return
    console.print(escape(f"{comparison}, {comparison.num_seeds} seeds"), highlight=False, soft_wrap=True)


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

    version = fetch(_store(store, tracking_uri), model, to, replace=force)
    if json:
        _show_json({"folder": str(to), **version.model_dump(mode="json")})
        return
    console.print(
        f"{version.name}/{version.version} in {to}: SHA-256 of every file verified, its example reproduced",
        highlight=False,
    )


@app.command(
    epilog="Examples: `dmlstudy embed digits-embedder@champion images/ -o embeddings.parquet` ·"
    " `dmlstudy embed model table.csv -o embeddings.parquet --workers 4`"
)
def embed(
    model: Annotated[str, typer.Argument(help="A registered model, or a folder that was pulled.")],
    input: Annotated[
        Path,
        typer.Argument(
            help="Image folder, image, .csv or .parquet table, .npy or .npz; vectors for models of these."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The Parquet file to write.")],
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
            help="A picture that cannot be decoded: error (it is named), or skip (left out and told)."
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

    Broken off, it goes on from its parts when it is called again; of files, also after one was removed or repaired.
    What was left out stands in the Parquet file's metadata, under dmlstudy.left_out.
    """
    from rich.progress import track

    from dmlstudy.serving.embed import Job, Runner, check_on_corrupt, embed_into, one_by_one, told

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

    with _model(model, store, tracking_uri) as folder:
        job = Job(
            str(folder),
            str(input.absolute()),
            str(output.absolute()),
            batch_size,
            device,
            check_on_corrupt(on_corrupt),
            max_pixels,
        )
        with quiet:
            made = embed_into(job, run, follow)
        lines = told(job, made)
    if json:
        _show_json({"file": str(output), **made._asdict()})
        return
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(f"{made.num_items} embeddings of size {made.dim} in {output}", highlight=False)


@app.command(
    epilog="Examples: `dmlstudy export digits-embedder@champion --format onnx` ·"
    " `dmlstudy export model --format torch_export -o embedder.pt2`"
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
    with _model(model, store, tracking_uri) as folder:
        made = exports.export(folder, path, format)
    if json:
        _show_json({"file": str(path), "difference": made.difference, **made.about})
        return
    entry = made.about["input"]
    shape = ", ".join(map(str, entry["shape"]))
    console.print(
        f"{path}: {entry['name']} {entry['dtype']} ({shape}) to {', '.join(made.about['outputs'])};"
        f" differs from the model by {made.difference:.1e} at most",
        highlight=False,
        soft_wrap=True,
    )


@app.command(
    epilog="Examples: `dmlstudy index embeddings.parquet -o gallery` ·"
    " `dmlstudy index embeddings.parquet -o gallery --kind ivf`"
)
def index(
    embeddings: Annotated[Path, typer.Argument(help="A file that `dmlstudy embed` wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to make.")],
    kind: Annotated[
        str, typer.Option(help="flat (exact), ivf, ivf_pq (in a fraction of the memory) or hnsw.")
    ] = "flat",
    json: JsonOption = False,
) -> None:
    """Make a gallery of embeddings, to be searched by `dmlstudy retrieve` and `dmlstudy serve`."""
    from dmlstudy.serving.gallery import build

    gallery = build(embeddings, output, kind)  # type: ignore[arg-type]
    if json:
        dim = gallery.vectors_MD.shape[1]
        _show_json({"folder": str(output), "num_items": len(gallery), "dim": dim, "kind": kind})
        return
    console.print(
        f"{len(gallery)} items of size {gallery.vectors_MD.shape[1]} in {output} ({kind})", highlight=False
    )


@app.command(
    epilog="Examples: `dmlstudy retrieve model gallery query.png -k 5` ·"
    " `dmlstudy retrieve digits-embedder gallery queries/ --sheet found.html`"
)
def retrieve(
    model: Annotated[
        str, typer.Argument(help="The model the gallery was made with, registered or a folder.")
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
    sheet: Annotated[
        Optional[Path], typer.Option("--sheet", help="Also write an HTML page of pictures.")
    ] = None,
    exclude_self: Annotated[
        bool, typer.Option("--exclude-self", help="Leave out the query's own item, where the gallery has it.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1; of the gallery's index too."),
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="As JSON, one line for each item.")] = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Find the nearest items of a gallery for each query; a smaller distance, in JSON a larger score, is nearer."""
    from dmlstudy.serving.embed import opened
    from dmlstudy.serving.gallery import open_gallery
    from dmlstudy.serving.retrieve import own_items, write_contact_sheet
    from dmlstudy.serving.retrieve import retrieve as find
    from dmlstudy.serving.retriever import Searcher

    with _model(model, store, tracking_uri) as folder:
        items = open_gallery(gallery, device=device)
        if items.note:
            print(f"note: {items.note}", file=sys.stderr)
        searcher = Searcher(folder, items, rerank=rerank, among=among, device=device)
        queries = opened(folder, query)
        hits = find(searcher, queries, k, is_own=own_items(items, query, queries) if exclude_self else None)
        if sheet is not None:
            write_contact_sheet(sheet, folder, searcher, queries, hits)
    if json:
        for hit in (hit for own in hits for hit in own):
            print(hit.model_dump_json())
        return
    rows = [
        (hit.query, str(hit.rank), hit.id, hit.label or "", f"{hit.distance:.4f}")
        for own in hits
        for hit in own
    ]
    _show_table(("query", "rank", "item", "label", "distance"), rows)


@app.command(
    epilog="Examples: `dmlstudy serve digits-embedder --gallery gallery` ·"
    " `DMLSTUDY_TOKEN=... dmlstudy serve model --host 0.0.0.0`"
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
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="A line on standard error for each request.")
    ] = True,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
) -> None:
    """Put a model, and a gallery, behind HTTP: POST /embed and /retrieve; GET /docs tells the bodies."""
    from dmlstudy.models import saved
    from dmlstudy.serving import guards, server

    token = os.environ.get("DMLSTUDY_TOKEN") or None
    if token_file is not None:
        token = guards.read_token(token_file)
    access = guards.Access.of(host, token, allowed_host or (), cors_origin or ())
    with ExitStack() as held:
        place = held.enter_context(server.bound(host, port))
        if not saved.is_model(model):
            from dmlstudy.registry.models import resolve

            found = resolve(_store(store, tracking_uri), model)  # what an alias means may change meanwhile
            model = f"{found.name}/{found.version}"
            name = name or model
        folder = held.enter_context(_model(model, store, tracking_uri))
        service = server.Service(
            folder,
            gallery,
            guards.Limits(),
            name=name,
            rerank=rerank,
            among=among,
            device=device,
        )
        if service.note:
            print(f"note: {service.note}", file=sys.stderr)
        console.print(
            f"{service.name} on http://{host}:{place.getsockname()[1]} (/docs tells how to ask; Ctrl-C ends it)",
            highlight=False,
            soft_wrap=True,
        )
        server.serve(service, place, access, is_logged=access_log)


@app.command(epilog="Examples: `dmlstudy ui --port 5000` · `dmlstudy ui --tracking-uri http://HOST:5000`")
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

    place = _store(store, tracking_uri)
    if place.server is not None:
        for study, link in links(place, port).items():
            print(f"{study}: {link.replace(f'http://127.0.0.1:{port}', place.server.rstrip('/'))}")
        return
    check(place, port)
    console.print(f"MLflow on http://127.0.0.1:{port} (Ctrl-C ends it)", highlight=False)
    for study, link in links(place, port).items():
        console.print(escape(f"{study}: {link}"), highlight=False, soft_wrap=True)
    serve(place, port)


@app.command(epilog="Examples: `dmlstudy delete digits` · `dmlstudy delete digits --yes --models`")
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

    place = _store(store, tracking_uri)
    there = cleanup.extent(place, study)
    what = ", ".join(
        (
            f"{there.num_runs} runs",
            f"{there.num_trials} trials",
            f"{cleanup.bytes_told(there.num_bytes)} of files",
            f"the registered {' '.join(there.versions)}" if there.versions else "no registered model",
        )
    )
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError(f"study {study!r} has {what}; delete it with --yes")
        typer.confirm(f"delete {study} with {what}?", abort=True)
    deleted = cleanup.delete(place, study, with_models=models)
    if json:
        _show_json(deleted.model_dump(mode="json"))
    else:
        print(f"deleted {study}: {what}")


@app.command(
    epilog="Examples: `dmlstudy prune --dry-run` · `dmlstudy prune --older-than 1d --also models/ --parts`"
)
def prune(
    older_than: Annotated[
        str, typer.Option("--older-than", help="Only what nobody has written to for so long, as 12h or 7d.")
    ] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    also: Annotated[
        Optional[list[Path]],
        typer.Option("--also", help="A folder in which a `pull` or an `embed` may have left something."),
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
    found = cleanup.prune(_store(store), seconds, dry_run=dry_run, also=also or [Path()], with_parts=parts)
    if json:
        _show_json([each.model_dump(mode="json") for each in found])
        return
    for each in found:
        print(f"{each.what}: {each.path} ({cleanup.bytes_told(each.num_bytes)})")
    total = cleanup.bytes_told(sum(each.num_bytes for each in found))
    print(f"{'would free' if dry_run else 'freed'} {total} in {len(found)} places")


@contextmanager
def _model(reference: str, store: Path, tracking_uri: str | None) -> Iterator[Path]:
    """A model's folder: one that was pulled, which needs no MLflow, or a verified copy of a registered one."""
    from dmlstudy import model_folder
    from dmlstudy.models import saved

    if saved.is_model(reference):
        model_folder.verify(reference)
        yield Path(reference).absolute()
        return
    from dmlstudy.registry.models import fetched

    with fetched(_store(store, tracking_uri), reference) as folder:
        yield folder.absolute()


def _store(root: Path, tracking_uri: str | None = None, patience_s: float | None = None) -> Store:
    from dmlstudy.store import Store

    place = Store(root.expanduser().absolute(), tracking_uri, given=dict(GIVEN))
    return place if patience_s is None else replace(place, patience_s=patience_s)


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
        print(f"interrupted; what was finished is kept, `{again}` goes on from there", file=sys.stderr)
        raise typer.Exit(130) from None
    except StudyFailed as error:
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from None
    if quiet:
        return
    _show_leaderboard(board)
    log = place.command("logs", study.name, "--engine")
    console.print(
        f"models: {place.command('models')}\nMLflow's page: {place.command('ui')}\nwhat the engines said: {log}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _say_notes(study: StudySpec) -> None:
    for note in study.notes:
        print(f"note: {note}", file=sys.stderr)


def _written_off(_: str) -> None:
    """Hears what nobody is to see."""


def _show_json(facts: Any) -> None:
    import json

    print(json.dumps(_without_nan(facts), indent=1))


def _without_nan(facts: Any) -> Any:
    """The facts with null for numbers that JSON has no word for."""
    if isinstance(facts, dict):
        return {name: _without_nan(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_without_nan(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


def _show_jobs(address: str, json: bool) -> None:
    from dmlstudy.engine import jobs

    listed = jobs.jobs(address)
    if json:
        _show_json([job.model_dump(mode="json") for job in listed])
    elif not listed:
        print(
            f"no jobs at {address}; send one with `dmlstudy submit STUDY.yaml --address {shlex.quote(address)}`"
        )
    else:
        _show_table(("job", "study", "state", "began", "time"), [jobs.job_row(job) for job in listed])


def _decision_facts(decision: Decision) -> dict[str, Any]:
    return {**decision.model_dump(mode="json"), "is_promoted": decision.is_promoted}


def _show_decision(decision: Decision, name: str, json: bool) -> None:
    from dmlstudy.registry import promotion

    if json:
        _show_json({"model": name, **_decision_facts(decision)})
    else:
        console.print(escape(promotion.said(decision, name)), highlight=False, soft_wrap=True)


def _only_in_a_store(job: str | None, what: str) -> None:
    if job:
        raise ValueError(
            f"{what} is in the store, which a job's cluster alone does not give: leave --job away, name the"
            " study and --store, on a machine that sees the store's folder"
        )


def _check_form(form: str, output: Path | None, against: str | None) -> None:
    """Raises ValueError for a form that there is none of, and for one that does not go where it is to go."""
    if form not in ("table", "json", "csv", "parquet"):
        raise ValueError(f"--format {form}: choose from table, json, csv, parquet")
    if form == "parquet" and output is None:
        raise ValueError("--format parquet is a file: name it with -o")
    if output is not None and (form == "table" or against is not None):
        raise ValueError(
            "-o is for a study's leaderboard in --format json, csv or parquet; set one, or leave -o away"
        )


def _show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _show_leaderboard(board: Leaderboard) -> None:
    objective = board.objective
    known = [name for name in SCORES if any(f"test_{name}" in row.test for row in board.rows)]
    tests = [f"test_{name}" for name in [objective, *(name for name in known if name != objective)][:2]]
    table = Table(title=f"{board.study}: {board.status}", title_justify="left", box=None)
    for column in ("family", f"val {objective}", *tests, "seeds", "trials"):
        table.add_column(column.replace("test_", "test "), no_wrap=True)
    for row in board.rows:
        spread = "" if row.validation_stderr is None else f" ± {row.validation_stderr:.3f}"
        table.add_row(
            f"{row.family}{' *' if row.family == board.winner else ''}",
            "-" if row.validation is None else f"{row.validation:.4f}{spread}",
            *(str(row.test.get(name, "-")) for name in tests),
            str(row.num_judged or ""),
            f"{row.num_finished}+{row.num_pruned}+{row.num_failed}" if row.num_tried else "",
        )
    console.print(table, highlight=False)
    console.print(
        "* best on what was held out in the search (mean over folds ± standard error)\n"
        "test: mean ± 95% t-interval over the row's seeds, each scored once\n"
        "trials: finished + stopped early + failed"
        + (f"\nregistered as {board.model} @champion" if board.model else ""),
        highlight=False,
    )
    if board.front:
        _show_front(board)
    if board.comparisons:
        _show_comparisons(board)


def _show_tally(boards: Sequence[Leaderboard], family: str, *, as_json: bool) -> None:
    from dmlstudy.registry.comparison import tallied
    from dmlstudy.text import nearest

    families = {row.family for board in boards for row in board.rows}
    if family not in families:
        raise ValueError(
            f"--against: no family {family!r} in these studies{nearest(family, families, listed=True)}"
        )
    tallies = tallied((board.comparisons for board in boards), family)
    if as_json:
        _show_json({rival: tally.model_dump(mode="json") for rival, tally in tallies.items()})
        return
    _show_table(
        (f"{family} against", "win/tie/loss"), [(rival, str(tally)) for rival, tally in tallies.items()]
    )


def _show_front(board: Leaderboard) -> None:
    objective, second = board.objective, board.second_objective
    console.print(
        f"\n{objective} against {second}, trials that none beats in both; the rows above are of each family's best"
        f" by {objective} alone:",
        highlight=False,
        soft_wrap=True,
    )
    _show_table(
        ("family", "trial", f"val {objective}", str(second)),
        [(one.family, f"#{one.trial}", f"{one.validation:.4f}", str(one.size)) for one in board.front],
    )


def _show_comparisons(board: Leaderboard) -> None:
    num = len(board.comparisons)
    nums = {comparison.num_seeds for comparison in board.comparisons}
    seeds = f" over {nums.pop()} seeds" if len(nums) == 1 else ""
    console.print(f"\ntest {board.objective}, paired by seed{seeds}:", highlight=False)
    for comparison in board.comparisons:
        own = "" if seeds else f", {comparison.num_seeds} seeds"
        console.print(f"  {escape(str(comparison))}{own}", highlight=False, soft_wrap=True)
    console.print(
        f"better, worse: p ≤ 0.05, adjusted for all {num} pairs (Holm): at most 5% of studies name a false one\n"
        f"[ ]: hold for all {num} pairs at once with 95% (Bonferroni); wider than the test, so one may reach past 0"
        " beside a better",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
