"""The study file: what is searched, on which data, with which budget and resources.

Every error is a ``SpecError`` of one line that starts with the key's path and ends with the fix.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from dmlstudy import bundled
from dmlstudy.losses.unused import unused
from dmlstudy.records import (
    REGISTERED,
    UNTRAINED,
    AugmentationConfig,
    BatchConfig,
    CodesConfig,
    Compared,
    DataConfig,
    EmbedderConfig,
    Grown,
    LossConfig,
    MetricsConfig,
    OnlineConfig,
    Record,
    ResourcesConfig,
    RetrievalConfig,
    Scalar,
    SeedRange,
    StartConfig,
    TrainingConfig,
    TrialConfig,
    draw_mismatch,
    number_list,
    present_key,
)
from dmlstudy.spec import library_losses, registered, sampler_choice, yaml_file
from dmlstudy.spec import space as spaces
from dmlstudy.spec.assignments import assigned
from dmlstudy.spec.budget import seconds_of
from dmlstudy.spec.earlier_keys import EARLIER_DEFAULTS, Renaming, stored, with_earlier_keys
from dmlstudy.spec.likeness import describe, likenesses
from dmlstudy.spec.pace import Work
from dmlstudy.spec.retention import KEY as RETENTION
from dmlstudy.spec.retention import RetentionConfig
from dmlstudy.spec.space import Choice, Domain, Fixed, Space
from dmlstudy.spec.study_paths import Places
from dmlstudy.text import nearest, one_line, shown
from dmlstudy.training.interface import Task
from dmlstudy.training.schedule import CONSTANT
from dmlstudy.training.tasks import OWN_SECTIONS, task_with, untrained_key

R = TypeVar("R", bound=BaseModel)

SEARCHES_APART = 1000
"""Between the seeds of two searches of a study: number r has those of the first + 1000 (r - 1)."""

MOST_OF_NAME = 64
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""The name of a study, family or model; it also names folders, runs and parameters."""

SECTIONS: dict[str, type[Record]] = {
    "embedder": EmbedderConfig,
    "batch": BatchConfig,
    "training": TrainingConfig,
    "augmentation": AugmentationConfig,
    "retrieval": RetrievalConfig,
    "hashing": CodesConfig,
    "online": OnlineConfig,
}
"""Sections of a family or study file with the record each one fills."""

NAMED = ("loss", "regularizer")
"""Sections with a name and its parameters; the name may be a choice whose options bring the parameters."""

STORAGE_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss", "file")
"""Schemes of ``resources.storage_path``: the filesystems of pyarrow."""

WORDS = {
    "string_pattern_mismatch": "use letters a to z, digits, . _ and -, a letter or digit first, 64 of them at most",
    "too_long": "there are more than it can have",
    "too_short": "needs at least one",
    "dict_type": "expected a section with keys of its own",
    "model_type": "expected a section with keys of its own",
}
"""Messages that replace the library's, by its type of error."""

CLAIMS = "claims.yaml"
"""The file beside the families that is none: claims of papers (``spec.claims``)."""

NO_REGULARIZER = "none"
"""The name under which nothing is added to the loss."""


YAML = (".yaml", ".yml")

PATHS = ("embedder.weights", "hashing.features", "online.features")
"""Parameters, beside those of the data, that may name a file or folder."""

NO_PATHS = ("default", "pixels", "grey")
"""Values of these that are no paths, whatever lies beside the study file."""


MAX_POINTS = 20_000
"""Points of all families' spaces that are built to check a study; beyond, checking it takes minutes."""


class SpecError(ValueError):
    """A study file that cannot be run: the key, what is wrong with it, and the fix, in one line of bounded length."""

    def __init__(self, message: object) -> None:
        super().__init__(one_line(message))


SAMPLERS = ("tpe", "gp", "cma", "qmc", "random", "nsga2")

HUB = "hub:"
"""The beginning of a sampler's name that is a package of OptunaHub."""


class StopRule(Record):
    """A search ends when its other trials would hardly pay."""

    gain: Annotated[
        PositiveFloat, Field(lt=1, description="by which the best objective would have to rise, as 0.002")
    ]
    probability: Annotated[
        PositiveFloat, Field(lt=1, description="below which a search ends, as 0.05: that any of them does so")
    ]

    @property
    def in_words(self) -> str:
        """The rule, of the trials that are left."""
        probability = f"{100 * self.probability:.3g}%"
        return f"raise its best by more than {self.gain:g} with a probability below {probability}"


BY_RULE, LISTED = "[by rule]", "[listed]"
"""The two forms of ``protocol.compare`` and ``search.warm_start``."""


def _form_of_list(value: object) -> str:
    return LISTED if isinstance(value, list | tuple) else BY_RULE


def _auto_or_listed(value: object) -> object:
    if _form_of_list(value) == BY_RULE and value != "auto":
        raise PydanticCustomError(
            "not_a_list", "write auto, or a list of earlier studies, as [first, second]"
        )
    return value


class SearchConfig(Grown):
    """Budget and search strategy; every family gets the same unless one search chooses among them."""

    LATER = ("fold_test", "registry", "stop_when")

    trials_per_family: Annotated[
        PositiveInt, Field(le=100_000, description="configurations of each family that are tried")
    ] = 19
    wall_time: Annotated[
        str | None, Field(description="after this time no generation is begun: 90s, 30min, 2h")
    ] = None
    device_hours: Annotated[
        PositiveFloat | None,
        Field(
            allow_inf_nan=False, description="the same, in hours of GPUs, or of CPUs where trials have none"
        ),
    ] = None
    stop_when: Annotated[
        StopRule | None,
        Field(
            description="{gain: 0.002, probability: 0.05}: a family's search ends before its number of trials when the"
            " others would raise its best by more than gain with a probability below this; default: it does not"
        ),
    ] = None
    families: Annotated[
        Literal["equal", "adaptive"],
        Field(description="adaptive: the sampler, tpe or random, chooses the family too, after the defaults"),
    ] = "equal"
    generation_size: Annotated[
        PositiveInt,
        Field(
            le=100_000,
            description="trials of a family that are asked for together, not knowing of each other's scores",
        ),
    ] = 1
    deterministic: Annotated[
        bool,
        Field(description="false: no generations; trials are asked for and stopped by what is known so far"),
    ] = True
    sampler: Annotated[
        str,
        Field(
            description="tpe | gp | cma | qmc | random | nsga2 | hub:PACKAGE: Optuna's, or of OptunaHub in registry |"
            " auto: qmc where the first generation has most of the trials, nsga2 with a second objective, tpe with"
            " adaptive families or more than 150 trials of each, else gp",
        ),
    ] = sampler_choice.AUTO
    registry: Annotated[
        str | None,
        Field(description="folder with packages of OptunaHub, of which sampler: hub:samplers/NAME is one"),
    ] = None
    second_objective: Annotated[
        Literal["embedding_dim", "latency_ms"] | None,
        Field(description="minimised beside the quality; needs nsga2"),
    ] = None
    scheduler: Annotated[
        Literal["asha", "halving", "hyperband", "median", "none"],
        Field(description="which trials are stopped early, or wait to be promoted"),
    ] = "asha"
    reduction_factor: Annotated[int, Field(ge=2, le=1000, description="keep the best 1/reduction_factor")] = 3
    fold_test: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="a trial is stopped between folds where its chance to end above its family's best is smaller;"
            " 0: never",
        ),
    ] = 0.0
    warm_start: Annotated[
        Annotated[tuple[Name, ...], Tag(LISTED)] | Annotated[Literal["auto"], Tag(BY_RULE)],
        Discriminator(_form_of_list),
        BeforeValidator(_auto_or_listed),
        Field(
            max_length=1000,
            description="earlier studies whose best configurations come first; auto: all, weighed by likeness",
        ),
    ] = ()
    seed: Annotated[int, Field(ge=0, lt=2**32, description="of sampling, folds and training")] = 0


FIXED, IN_STEPS = "[fixed]", "[in steps]"
"""The two forms of ``protocol.verdict_seeds``."""


def _form_of_seeds(value: object) -> str:
    return IN_STEPS if isinstance(value, Mapping | SeedRange) else FIXED


MOST_IN_PAIRS = 4000
"""Characters of all pairs of ``protocol.compare``: the plan of the verdict is kept in one tag of the study's run."""


class Replicated(Record):
    """A search that is done again: of which study, and as which number."""

    study: Name
    number: Annotated[int, Field(ge=2, le=100)]

    @property
    def first_seed(self) -> int:
        """The first of its verdict's seeds: no two searches of a study train by the same ones."""
        return 1 + SEARCHES_APART * (self.number - 1)


class ProtocolConfig(MetricsConfig, Grown):
    """Evaluation of trials: folds over the development classes, seeds on the test classes."""

    LATER = (
        "retention",
        "decide_on",
        "give_up",
        "compare",
        "searches",
        "search_leaders",
        "search_seeds",
        "replicate_of",
        "verification",
        "fmr",
        "short_vectors",
        "reid",
    )

    num_folds: Annotated[
        PositiveInt,
        Field(
            le=1000,
            description="parts the development classes are cut in, each held out once; 1: half of them",
        ),
    ] = 4
    verdict_seeds: Annotated[
        Annotated[PositiveInt, Field(le=1000), Tag(FIXED)] | Annotated[SeedRange, Tag(IN_STEPS)],
        Discriminator(_form_of_seeds),
        Field(
            description="seeds each family's best is trained and judged with; {from: 3, to: 10}: seeds are added until"
            " the pairs are decided, or the limit"
        ),
    ] = 5
    decide_on: Annotated[
        Literal["classes_like_these", "these_classes"] | None,
        Field(
            description="with verdict_seeds: {from, to}, the population that a pair is decided on; default:"
            " classes_like_these with 10 test classes or more and a metric that is a mean over queries"
        ),
    ] = None
    give_up: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="with verdict_seeds: {from, to}, a pair gets no more seeds where its chance to be decided with"
            " all of them is smaller; 0: never",
        ),
    ] = 0.1
    compare: Annotated[
        Annotated[Literal["winner", "all"] | None, Tag(BY_RULE)]
        | Annotated[tuple[tuple[Name, Name], ...], Field(min_length=1), Tag(LISTED)],
        Discriminator(_form_of_list),
        Field(
            description="pairs of the verdict: the winner on validation with each other family and its own untrained"
            " embedder, all, or [[a, b], [a, c]], these pairs of families alone; default: all, and winner with"
            " verdict_seeds: {from, to}"
        ),
    ] = None
    searches: Annotated[
        PositiveInt,
        Field(
            le=100,
            description="times that the whole search of the leading families is done, each from another seed, for"
            " the luck of the search; 1: once, and nothing is known of it",
        ),
    ] = 1
    search_leaders: Annotated[
        int,
        Field(ge=2, le=100, description="families, the best on validation first, whose search is done again"),
    ] = 2
    search_seeds: Annotated[
        int, Field(ge=2, le=1000, description="seeds that the best of each repeated search is judged with")
    ] = 2
    replicate_of: Annotated[
        Replicated | None,
        Field(
            description="of a search that is done again, which is a study of its own: {study: the one it belongs to,"
            " number: 2 or higher}"
        ),
    ] = None
    fold_models: Annotated[
        bool, Field(description="judge a model per fold as well: separately, and concatenated")
    ] = True
    objective: Annotated[
        str,
        Field(
            description="the metric that is searched for and decides; default is map_at_r, of codes map, of streams"
            " accuracy"
        ),
    ] = "default"
    retention: Annotated[
        RetentionConfig | None,
        Field(
            description="other data, with keys as of data (else the study's), whose test classes every verdict trial's"
            " model is scored on as well: what is kept elsewhere"
        ),
    ] = None

    @property
    def most_seeds(self) -> int:
        """Seeds of the verdict; at most, where they are added until it is decided."""
        seeds = self.verdict_seeds
        return seeds.most if isinstance(seeds, SeedRange) else seeds

    @property
    def pairs(self) -> Compared:
        """The pairs that are compared, with the default resolved."""
        return self.compare or ("winner" if isinstance(self.verdict_seeds, SeedRange) else "all")


class FamilyEntry(Grown):
    """One competitor: a search-space file, with domains or values that replace some of the file's."""

    LATER = ("like", "fix")

    space: Annotated[str, Field(description="a name that `dmlstudy families` lists, or a file of your own")]
    override: Annotated[
        dict[str, Any],
        Field(description="section.parameter: a value or a domain, over the space's and the study's"),
    ] = {}
    like: Annotated[
        Name | None,
        Field(
            description="another family, whose values it takes trial by trial for all parameters that both search"
        ),
    ] = None
    fix: Annotated[
        Literal["best"] | None,
        Field(description="beside like: best takes those of its best configuration, once it is found"),
    ] = None


class StudyFile(Record):
    """The study file as written; ``StudySpec`` is what it means."""

    name: Annotated[Name, Field(description="the study's, in the store and in MLflow")]
    model_name: Annotated[
        Name | None, Field(description="the registered model's; default: the study's name and -embedder")
    ] = None
    data: DataConfig
    embedder: dict[str, Any] = {}
    batch: dict[str, Any] = {}
    training: dict[str, Any] = {}
    augmentation: dict[str, Any] = {}
    retrieval: dict[str, Any] = {}
    hashing: Annotated[
        dict[str, Any], Field(description="of families that learn codes of frozen features")
    ] = {}
    online: Annotated[
        dict[str, Any], Field(description="of families that learn from a stream of constraints")
    ] = {}
    regularizer: Annotated[dict[str, Any], Field(description="if given, that of every family")] = {}
    families: Annotated[dict[Name, FamilyEntry], Field(min_length=1, max_length=200)]
    search: SearchConfig = SearchConfig()
    protocol: ProtocolConfig = ProtocolConfig()
    resources: ResourcesConfig = ResourcesConfig()


class Family:
    """A competitor of the study: a loss or a choice of losses, and everything searched with it."""

    def __init__(self, name: str, paper: str, space: Space) -> None:
        self.name = name
        self.paper = paper
        self.space = space
        """Full names (``loss.name``, ``loss.p``, ``training.lr``) to domains."""
        self.stored = stored(space)
        """The same under the names that points in Optuna's storage have."""

    def sample(self, trial: spaces.Suggester) -> dict[str, Scalar | None]:
        """Full names to values, each drawn as ``<family>/<full name>``."""
        values: dict[str, Scalar | None] = {}
        for section, space in self.sections().items():
            drawn = spaces.sample(space, trial, f"{self.name}/{section}")
            values |= {present_key(f"{section}.{name}"): value for name, value in drawn.items()}
        return values

    def default_point(self) -> dict[str, Scalar]:
        """The family's defaults, under the names ``sample`` draws."""
        point: dict[str, Scalar] = {}
        for section, space in self.sections().items():
            point |= spaces.defaults(space, f"{self.name}/{section}")
        return point

    def corners(self) -> list[dict[str, Scalar]]:
        """The default point, and points with one parameter at an edge, once for each of its places."""
        return [self.default_point(), *self._changed(spaces.corners)]

    def inner_points(self) -> list[dict[str, Scalar]]:
        """Points with one real parameter between its bounds, once for each of its places."""
        return self._changed(spaces.inner_points)

    def _changed(
        self, changes_of: Callable[[Space, str], list[dict[str, Scalar]]]
    ) -> list[dict[str, Scalar]]:
        point = self.default_point()
        return [
            point | change
            for section, space in self.sections().items()
            for change in changes_of(space, f"{self.name}/{section}")
        ]

    def tree(self) -> list[str]:
        """The space as indented lines, for people."""
        return tree(self.space)

    @property
    def task(self) -> Task:
        """The task of its trials, by the section of its file; without one they train an embedder."""
        return task_with(lambda section: bool(_section(self.space, section)))

    def sections(self) -> dict[str, Space]:
        """The space by section, under the names that storage has."""
        sections = dict.fromkeys(full_name.partition(".")[0] for full_name in self.stored)
        return {section: _section(self.stored, section) for section in sections}


class StudySpec:
    """A study file with its families resolved and everything checked that can be without data or cluster."""

    def __init__(
        self,
        file: StudyFile,
        raw: Mapping[str, Any],
        places: Places | None = None,
        renaming: Renaming | None = None,
    ) -> None:
        self.raw = raw
        self._renaming = renaming or Renaming()
        self.places = places or Places()
        """The folders in which its relative paths are looked up."""
        self.starts: dict[tuple[str, str], StartConfig] = {}
        """By backbone and ``embedder.weights``, what these stand for, once ``studies.starts`` has settled it."""
        self._is_sampler_chosen = file.search.sampler == sampler_choice.AUTO
        self.file = file = _with_sampler(_at_home(file))
        path = file.data.path
        self.data = file.data.model_copy(
            update={"path": None if path is None else self._lead("data.path", path)}
        )
        """The file's, with an absolute path: workers have other working folders."""
        registry = file.search.registry
        self.search = file.search.model_copy(
            update={"registry": None if registry is None else self._lead("search.registry", registry)}
        )
        """The file's, with an absolute path."""
        self.retention = self._retention()
        """The data of ``protocol.retention`` in the same way, with the study's settings where it has none."""
        if UNTRAINED in file.families:
            raise SpecError(f"families.{UNTRAINED}: this name is the untrained embedder's; choose another")
        _check_search(file.search)
        _check_fold_test(file)
        _check_warm_start(file)
        _check_protocol(file.protocol)
        _check_pairs(file)
        _check_searches(file)
        _check_storage_path(file.resources.storage_path)
        self.families = {
            name: _family(name, self._with_space(name, entry), file, f"families.{name}", self._renaming)
            for name, entry in file.families.items()
        }
        self.file = file = _with_objective(file, self.task)
        num_points = sum(len(family.corners()) for family in self.families.values())
        if num_points > MAX_POINTS:
            raise SpecError(
                f"families: {num_points} points of their spaces would have to be checked, and at most {MAX_POINTS} are;"
                " give choices fewer options, or the study fewer families"
            )
        for name, family in self.families.items():
            path = f"families.{name}"
            for values in self.checked(family):
                self.trial_config(family, values, path=path)
        _check_epochs(file, self.families)
        _check_task(file, self.families)
        try:
            self.likenesses = likenesses(file.families, self.families, file.search)
        except ValueError as error:
            raise SpecError(error) from None
        """Families that take the points of others, each after the one it is like."""

    @property
    def task(self) -> Task:
        """The task of the families' trials, the same for all."""
        return next(iter(self.families.values())).task

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def model_name(self) -> str:
        return self.file.model_name or f"{self.file.name}-{self.task.product}"

    @property
    def num_search_trials(self) -> int:
        return sum(map(self.num_trials_of, self.families))

    def num_trials_of(self, family: str) -> int:
        """Trials of a family's search; one of a family that only takes another's best."""
        likeness = self.likenesses.get(family)
        if likeness is not None and likeness.is_best and not likeness.own:
            return 1
        return self.file.search.trials_per_family

    def search_in_words(self, unit: str = "") -> str:
        """Families by trials; those that have one trial, of another's best, apart."""
        single = sum(self.num_trials_of(name) < self.file.search.trials_per_family for name in self.families)
        line = f"{len(self.families) - single} families x {self.file.search.trials_per_family}{unit}"
        return f"{line}, and {single} x 1" if single else line

    @property
    def sampler_in_words(self) -> str:
        """The sampler, and why it is that one where the file leaves the choice."""
        sampler = self.file.search.sampler
        return f"{sampler}, as {_chosen(self.file.search).why}" if self._is_sampler_chosen else sampler

    def tree(self, family: str) -> list[str]:
        """A family's space as indented lines, and what it takes from another."""
        lines = self.families[family].tree()
        if family in self.likenesses:
            lines += describe(family, self.likenesses[family], self.families)
        return lines

    @property
    def is_bound(self) -> bool:
        """True if the study may have fewer trials than planned: of the verdict, or of a search that ends early."""
        file = self.file
        return isinstance(file.protocol.verdict_seeds, SeedRange) or file.search.stop_when is not None

    @property
    def num_verdict_trials(self) -> int:
        """Each family's best with every seed, and each untrained embedder with every seed; at most."""
        return self.file.protocol.most_seeds * (len(self.families) + self.num_untrained)

    @property
    def work(self) -> Work:
        """The work of a trial of the search, and of one of the verdict."""
        protocol = self.file.protocol
        return Work.of(protocol.num_folds, fold_models=protocol.fold_models and self.task.has_fold_models)

    @property
    def num_untrained(self) -> int:
        """Number of different embedders among the families' bests; an upper bound if the embedder is searched."""
        fixed: set[frozenset[tuple[str, Any]]] = set()
        num_searched = 0
        for family in self.families.values():
            own = {untrained_key(self.trial_config(family, values)) for values in self.corners(family)}
            num_searched += len(own) > 1
            fixed |= own if len(own) == 1 else set()
        return len(fixed) + num_searched

    @property
    def notes(self) -> list[str]:
        """Lines on what was read differently than people may expect."""
        losses = [
            str(values.get("loss.name", ""))
            for each in self.families.values()
            for values in self.corners(each)
        ]
        return [
            *self._renaming.notes,
            *self.places.notes.values(),
            *self._notes_on_schedules(),
            *library_losses.notes_on(losses),
            *self._notes_on_baselines(losses),
        ]

    def _notes_on_baselines(self, losses: Sequence[str]) -> list[str]:
        """A line on baselines that the study has not among its families."""
        missing = [name for name in self.task.baselines if name not in losses]
        if not missing or self.file.protocol.replicate_of is not None:
            return []
        entry = f"{missing[0].replace('_', '-')}: {{space: {missing[0]}}}"
        return [
            f"families: none is {', '.join(missing)}, which cost little and are what the others have to beat; add them,"
            f" as {entry}"
        ]

    def _notes_on_schedules(self) -> list[str]:
        """A line on rungs, where trials are stopped early by scores from before their rates have fallen."""
        scheduler = self.file.search.scheduler
        if scheduler == "none":
            return []
        for family in self.families.values():
            for values in self.corners(family):
                if (kind := values.get("training.schedule") or CONSTANT) != CONSTANT:
                    return [
                        f"training.schedule: {kind} ends low, so that scores at the rungs of search.scheduler:"
                        f" {scheduler} understate what a trial would come to; search.scheduler: none stops no trial"
                    ]
        return []

    def check_for_job(self) -> None:
        """Raises SpecError where a path leads to something on this machine alone, which a cluster does not have."""
        for key, path in self.places.local.items():
            raise SpecError(
                f"{key}: {path} is relative, but a job runs in a folder and home of its own; give an absolute path that"
                " all nodes of the cluster see"
            )

    def _lead(self, key: str, path: str) -> str:
        try:
            return self.places.lead(key, path)
        except ValueError as error:
            raise SpecError(error) from None

    def _retention(self) -> DataConfig | None:
        written = self.file.protocol.retention
        if written is None:
            return None
        path = None if written.path is None else self._lead(f"{RETENTION}.path", written.path)
        return written.settled(self.data, path)

    def _with_space(self, name: str, entry: FamilyEntry) -> FamilyEntry:
        """The entry, with an absolute path where its space is a file of the user's."""
        if entry.space in family_files() or not entry.space.endswith(YAML):
            return entry
        return entry.model_copy(update={"space": self._lead(f"families.{name}.space", entry.space)})

    def fingerprint(self) -> str:
        """First 16 hex digits of ``digest``."""
        return self.digest()[:16]

    def digest(self) -> str:
        """The SHA-256 of ``meaning``."""
        return hashlib.sha256(json.dumps(self.meaning(), sort_keys=True).encode()).hexdigest()

    def meaning(self) -> dict[str, Any]:
        """The meaning of the study as JSON: its file with defaults and spaces resolved, its resources left out."""
        file = self.file.model_dump(mode="json", exclude={"resources"})
        for key in DataConfig.SPEED:
            file["data"].pop(key, None)
            file["protocol"].get("retention", {}).pop(key, None)
        return {
            "file": with_earlier_keys(file),
            "spaces": {name: tree(family.stored) for name, family in self.families.items()},
            "workers": self.file.resources.workers,
        }

    def corners(self, family: Family) -> list[dict[str, Scalar | None]]:
        """The family's default values, and those with one parameter at an edge of its domain.

        A parameter that exists only under a choice is at its edges where the choice is made.
        """
        return [family.sample(_Answers(point)) for point in family.corners()]

    def checked(self, family: Family) -> list[dict[str, Scalar | None]]:
        """The same, and those with one real parameter between its bounds: values that trials must be able to have."""
        inner = [family.sample(_Answers(point)) for point in family.inner_points()]
        return self.corners(family) + inner

    def trial_config(
        self,
        family: Family,
        values: Mapping[str, Scalar | None],
        *,
        phase: Literal["search", "verdict"] = "search",
        seed: int | None = None,
        path: str = "",
    ) -> TrialConfig:
        """The configuration of one trial from full names (``loss.name``, ``training.lr``) and values.

        Relative paths are made absolute: workers have other working folders.
        """
        sections: dict[str, dict[str, Scalar | None]] = {name: {} for name in (*NAMED, *SECTIONS)}
        for full_name, value in values.items():
            section, _, name = full_name.partition(".")
            sections[section][name] = self._found_from_anywhere(full_name, value)
        records: dict[str, Any] = {
            name: _record(record, sections[name], f"{path}.{name}" if path else name)
            for name, record in SECTIONS.items()
            if name not in OWN_SECTIONS or sections[name]
        }
        protocol = self.file.protocol
        is_regularized = sections["regularizer"].get("name", NO_REGULARIZER) != NO_REGULARIZER
        regularizer = _named(sections["regularizer"]) if is_regularized else None
        if regularizer and regularizer.params.get("draw") == "two_draws" and "draw" not in sections["batch"]:
            records["batch"] = records["batch"].model_copy(update={"draw": "two_draws"})
        if problem := draw_mismatch(records["batch"], regularizer):
            raise SpecError(f"{path}: {problem}" if path else problem)
        return TrialConfig(
            family=family.name,
            phase=phase,
            data=self.data,
            loss=_named(sections["loss"]),
            regularizer=regularizer,
            num_folds=protocol.num_folds,
            fold_models=protocol.fold_models and protocol.num_folds > 1 and self.task.has_fold_models,
            seed=self.file.search.seed if seed is None else seed,
            objective=protocol.objective,
            measure_latency=phase == "search" and self.file.search.second_objective == "latency_ms",
            start=self.starts.get((records["embedder"].backbone, records["embedder"].weights or "")),
            retention=self.retention,
            **{name: getattr(protocol, name) for name in MetricsConfig.model_fields},
            **records,
        )

    def _found_from_anywhere(self, full_name: str, value: Scalar | None) -> Scalar | None:
        """The absolute path, where the value is that of a file or folder."""
        if full_name not in PATHS or not isinstance(value, str) or value in NO_PATHS:
            return value
        if value.startswith(REGISTERED):
            try:
                return registered.with_absolute_store(value, lambda path: self._lead(full_name, path))
            except ValueError as error:
                raise SpecError(error) from None
        return self._lead(full_name, value) if value[:1] == "~" or self.places.leads(value) else value


def _at_home(file: StudyFile) -> StudyFile:
    """The study with its storage path written out, where that begins with ``~``."""
    path = file.resources.storage_path
    if path is None or not path.startswith("~"):
        return file
    resources = file.resources.model_copy(update={"storage_path": os.path.expanduser(path)})
    return file.model_copy(update={"resources": resources})


def _check_search(search: SearchConfig) -> None:
    """Raises SpecError for what is wrong with a search beyond each key alone."""
    if search.wall_time is not None:
        try:
            seconds_of(search.wall_time)
        except ValueError as error:
            raise SpecError(f"search.wall_time: {error}") from None
    if search.sampler not in SAMPLERS and not re.fullmatch(rf"{HUB}[\w-]+(/[\w-]+)*(:\w+)?", search.sampler):
        raise SpecError(
            f"search.sampler: no sampler {search.sampler!r}{nearest(search.sampler, (*SAMPLERS, sampler_choice.AUTO))};"
            f" {HUB}PACKAGE is one of search.registry"
        )
    if (search.second_objective is None) == (search.sampler == "nsga2"):
        raise SpecError(
            "search.sampler: nsga2 and a second objective go together; set search.second_objective:"
            " embedding_dim or latency_ms, or leave out search.sampler"
            if search.second_objective is None
            else f"search.second_objective: needs sampler nsga2, not {search.sampler}; set search.sampler: nsga2"
        )
    if search.second_objective and search.scheduler != "none":
        raise SpecError(
            f"search.scheduler: {search.scheduler} would stop small embedders for their quality alone;"
            " set search.scheduler: none beside search.second_objective"
        )
    if search.second_objective and search.stop_when:
        raise SpecError(
            f"search.stop_when: tells what further trials gain of one objective, and search.second_objective:"
            f" {search.second_objective} is a second one; leave one of the two out"
        )
    if search.sampler.startswith(HUB) != (search.registry is not None):
        raise SpecError(
            "search.registry: is read with sampler: hub:PACKAGE alone; leave it out"
            if search.registry
            else f"search.sampler: {search.sampler} needs search.registry, the folder that holds its package"
        )
    if search.families == "adaptive" and search.sampler not in ("tpe", "random"):
        raise SpecError(
            f"search.sampler: {search.sampler} cannot model a choice of family with the parameters under it;"
            " set search.sampler: tpe, or search.families: equal"
        )
    if search.generation_size > 1 and not search.deterministic:
        raise SpecError(
            "search.generation_size: there are no generations with search.deterministic: false;"
            " leave one of the two out"
        )


def _check_warm_start(file: StudyFile) -> None:
    """Raises SpecError for a study that begins with its own points."""
    if file.name in file.search.warm_start and file.search.warm_start != "auto":
        raise SpecError(
            f"search.warm_start: {file.name} is this study itself; name earlier ones, or set auto"
        )


def _check_fold_test(file: StudyFile) -> None:
    """Raises SpecError for a fold test without folds to compare, or of trials that quality alone does not rank."""
    if not file.search.fold_test:
        return
    if file.protocol.num_folds < 2:
        raise SpecError(
            "search.fold_test: there is one fold; set protocol.num_folds: 4, or leave search.fold_test out"
        )
    if file.search.second_objective:
        raise SpecError(
            "search.fold_test: would stop trials for their quality alone; leave it or second_objective out"
        )


def _check_protocol(protocol: ProtocolConfig) -> None:
    """Raises SpecError for a key that only a verdict in steps reads."""
    if isinstance(protocol.verdict_seeds, SeedRange):
        return
    for key in ("decide_on", "give_up"):
        if key in protocol.model_fields_set and getattr(protocol, key) is not None:
            raise SpecError(
                f"protocol.{key}: {getattr(protocol, key)} is read only where seeds are added until the verdict is"
                " decided; set protocol.verdict_seeds: {from: 3, to: 10}, or leave it away"
            )


def _check_pairs(file: StudyFile) -> None:
    """Raises SpecError for pairs of the verdict that are no pairs of the study's families."""
    pairs = file.protocol.compare
    if pairs is None or isinstance(pairs, str):
        return
    seen: set[frozenset[str]] = set()
    for pair in pairs:
        key = f"protocol.compare: [{', '.join(pair)}]"
        for name in pair:
            if name not in file.families:
                raise SpecError(f"{key}: no family {name}{nearest(name, file.families)}")
        if len(set(pair)) == 1:
            raise SpecError(f"{key} is a family with itself; name two, or leave the pair out")
        if frozenset(pair) in seen:
            raise SpecError(f"{key} stands there twice; leave one out")
        seen.add(frozenset(pair))
    num_characters = len(json.dumps(pairs, separators=(",", ":")))
    if num_characters > MOST_IN_PAIRS:
        raise SpecError(
            f"protocol.compare: {len(pairs)} pairs of {num_characters} characters, and {MOST_IN_PAIRS} can be kept;"
            " name fewer, or set protocol.compare: all"
        )


def replicate_name(study: str, number: int) -> str:
    """The name of a study that does a study's search again; the study itself is number 1."""
    return f"{study}.search{number}"


def _check_searches(file: StudyFile) -> None:
    """Raises SpecError where the searches of a study could not be done again."""
    protocol, search = file.protocol, file.search
    if protocol.searches == 1:
        return
    key = f"protocol.searches: {protocol.searches}"
    if search.families != "equal":
        raise SpecError(
            f"{key} needs a search for each family, and search.families: {search.families} is one for all; set"
            " search.families: equal"
        )
    if search.warm_start == "auto":
        raise SpecError(
            f"{key} stands beside search.warm_start: auto, by which each search would begin with what the one before"
            " has found; name the earlier studies, or leave it out"
        )
    if protocol.search_leaders > len(file.families):
        raise SpecError(
            f"protocol.search_leaders: {protocol.search_leaders} of {len(file.families)} families; lower it, or name"
            " more families"
        )
    if protocol.search_seeds > protocol.most_seeds:
        raise SpecError(
            f"protocol.search_seeds: {protocol.search_seeds} is more than protocol.verdict_seeds gives the first"
            " search; lower it"
        )
    longest = replicate_name(file.name, protocol.searches)
    if len(longest) > MOST_OF_NAME:
        raise SpecError(
            f"name: {file.name} is too long for {key}, whose studies are called {longest}; shorten it by"
            f" {len(longest) - MOST_OF_NAME} characters"
        )


def _check_epochs(file: StudyFile, families: Mapping[str, Family]) -> None:
    """Raises SpecError where not all trials of the study have equally many epochs."""
    epochs = {
        name: family.space.get("training.epochs", Fixed(TrainingConfig().epochs))
        for name, family in families.items()
    }
    first = next(iter(epochs))
    for name, domain in epochs.items():
        where = "training.epochs"
        if any(full_name.partition("@")[0] == where for full_name in file.families[name].override):
            where = f"families.{name}.override.{where}"
        elif "epochs" not in file.training:
            where = f"families.{name}.space: {where}"
        own = {key: domain for key, domain in families[name].space.items() if key != "training.epochs"}
        if not isinstance(domain, Fixed) or "epochs" in spaces.names(_section(own, "training")):
            raise SpecError(
                f"{where}: epochs are not searched, for trials are compared epoch by epoch; set one number"
            )
        if domain != epochs[first]:
            raise SpecError(
                f"{where}: {name} has {domain.value} epochs, but {first} another number; all families need"
                " the same: set training.epochs for all of them"
            )


def _check_task(file: StudyFile, families: Mapping[str, Family]) -> None:
    """Raises SpecError where families learn different kinds of things, or with settings that do not apply to them."""
    first, *others = families.values()
    task = first.task
    for other in others:
        if other.task is not task:
            raise SpecError(
                f"families.{other.name}: trains {other.task.noun}, but {first.name} {task.noun}; they are"
                " judged on other data: make two studies of them"
            )
    unused = [name for name in SECTIONS if name not in task.sections]
    for section in sorted(unused, key=lambda name: name not in OWN_SECTIONS):
        if getattr(file, section):
            raise SpecError(f"{section}: means nothing to {task.noun}; leave it out")
        for name, family in families.items():
            if _section(family.space, section):
                raise SpecError(
                    f"families.{name}: has a section {section}, which means nothing to {task.noun}, that the section"
                    f" {task.section} is for; make a study of its own of it"
                )
    for metric in task.unmeasured:
        if getattr(file.protocol, metric):
            raise SpecError(f"protocol.{metric}: is not measured of {task.noun}; leave it out")
    second, measured = file.search.second_objective, task.second_objectives
    if second and second not in measured:
        raise SpecError(
            f"search.second_objective: {second} is not measured of {task.noun};"
            + (f" set {' or '.join(measured.values())}" if measured else " leave it out")
        )
    protocol = file.protocol
    if protocol.fmr != ProtocolConfig.model_fields["fmr"].default and not protocol.verification:
        raise SpecError(
            f"protocol.fmr: {protocol.fmr:g} is of the threshold that protocol.verification sets; set"
            " protocol.verification: true, or leave it out"
        )
    if file.resources.workers != 1 and not task.is_distributed:
        raise SpecError(
            f"resources.workers: one process trains {task.noun}, not {file.resources.workers}; set resources.workers:"
            " 1, and more trials run at once"
        )
    if file.resources.gpus_per_worker and not task.uses_gpu:
        raise SpecError(
            f"resources.gpus_per_worker: {task.noun} computes on a CPU, and would keep its GPU idle; leave it out"
        )


def _with_sampler(file: StudyFile) -> StudyFile:
    """The file with the sampler that ``auto`` stands for."""
    if file.search.sampler != sampler_choice.AUTO:
        return file
    search = file.search.model_copy(update={"sampler": _chosen(file.search).name})
    return file.model_copy(update={"search": search})


def _chosen(search: SearchConfig) -> sampler_choice.SamplerChoice:
    return sampler_choice.of_budget(
        search.trials_per_family,
        search.generation_size if search.deterministic else None,
        is_adaptive=search.families == "adaptive",
        has_second_objective=search.second_objective is not None,
    )


def _with_objective(file: StudyFile, task: Task) -> StudyFile:
    """The file with its task's objective where it names none."""
    if file.protocol.objective != "default":
        return file
    protocol = file.protocol.model_copy(update={"objective": task.objective})
    return file.model_copy(update={"protocol": protocol})


def _check_storage_path(path: str | None) -> None:
    """Raises SpecError for faults that show without access to it, and does not repeat a secret in it."""
    if path is None:
        return
    key = "resources.storage_path"
    scheme, is_uri, rest = path.partition("://")
    if registered.SECRET.search(path):
        raise SpecError(
            f"{key}: holds a password or key, which would be written down with the study; leave it out, and give it"
            " to all nodes by environment or role"
        )
    if not is_uri and not Path(path).is_absolute():
        raise SpecError(f"{key}: expected an absolute path or a URI, as /folder or s3://bucket/folder")
    if is_uri and scheme not in STORAGE_SCHEMES:
        raise SpecError(f"{key}: no filesystem {scheme!r}{nearest(scheme, STORAGE_SCHEMES, listed=True)}")
    if is_uri and (not rest.partition("?")[0].strip("/") or "#" in rest):
        raise SpecError(f"{key}: {path!r} names no folder; write as {scheme}://bucket/folder")
    if scheme == "file" and not rest.startswith("/"):
        raise SpecError(f"{key}: {path!r} names another machine; write file:///folder with three slashes")


def load(
    path: str | Path, name: str | None = None, assignments: Sequence[str] | Mapping[str, Any] = ()
) -> StudySpec:
    """Read and check a study file, under another ``name`` if one is given; raises SpecError.

    ``assignments`` (``key=value``) replace some of the file's values first. Relative paths are relative to the file's
    folder, or, where that does not have them, to the current one.
    """
    file = Path(path).expanduser()
    raw = _read_yaml(file, "a study file; the ready ones are in search_spaces/studies")
    return given(raw, name, assignments, Places(file.absolute().parent, Path.cwd()))


def given(
    raw: Mapping[str, Any],
    name: str | None = None,
    assignments: Sequence[str] | Mapping[str, Any] = (),
    places: Places | None = None,
) -> StudySpec:
    """Check a new study that is given as a mapping, as ``load`` does; raises SpecError.

    Beyond ``parse``, which also reads studies of earlier versions, parameters without effect are refused.
    """
    renaming = Renaming()
    try:
        raw = assigned(renaming.study(raw), assignments, StudyFile.model_fields, renaming.assignment)
    except ValueError as error:
        raise SpecError(error) from None
    spec = parse({**raw, "name": name} if name else raw, places, renaming)
    for family in spec.families.values():
        _check_used(spec, family)
    return spec


def parse(
    raw: Mapping[str, Any], places: Places | None = None, renaming: Renaming | None = None
) -> StudySpec:
    """Check a study given as a mapping, with relative paths in the current folder or ``places``; raises SpecError."""
    renaming = renaming or Renaming()
    try:
        present = renaming.study(raw)
    except ValueError as error:
        raise SpecError(error) from None
    return StudySpec(_record(StudyFile, present, ""), raw, places, renaming)


def as_begun(spec: StudySpec, fingerprint: str) -> StudySpec:
    """The study with the defaults under which it has this fingerprint: today's, or those of an earlier version."""
    if spec.fingerprint() == fingerprint:
        return spec
    for defaults in EARLIER_DEFAULTS:
        search = {**defaults, **(spec.raw.get("search") or {})}
        try:
            earlier = parse({**spec.raw, "search": search}, spec.places)
        except SpecError:  # what the file has beside them was not possible then
            continue
        if earlier.fingerprint() == fingerprint:
            return earlier
    return spec


def _check_used(spec: StudySpec, family: Family) -> None:
    """Raises SpecError for a parameter that the family's weighting, mining or mode leaves without effect."""
    for values in spec.corners(family):
        for section in NAMED:
            prefix = f"{section}."
            own = {
                full_name.removeprefix(prefix): value
                for full_name, value in values.items()
                if full_name.startswith(prefix) and value is not None
            }
            for each in unused(str(own.pop("name", "")), own):
                full_name, switch = prefix + each.name, prefix + each.switch
                users = " or ".join(each.users)
                fix = f"set {switch}: {users}"
                if isinstance(family.space.get(switch), Choice):
                    fix = f"put it under the options of {switch} that use it: {users}"
                raise SpecError(
                    f"{_place_of(spec.file.families[family.name], family.name, full_name)}: {shown(each.value)} is not"
                    f" used by {switch}: {each.chosen}; leave it out, or {fix}"
                )


def _place_of(entry: FamilyEntry, name: str, full_name: str) -> str:
    """The origin of a family's parameter: its override, or else its space or the study's own section."""
    if full_name in entry.override:
        return f"families.{name}.override.{full_name}"
    section, _, leaf = full_name.partition(".")
    if isinstance(within := entry.override.get(section), Mapping) and leaf in within:
        return f"families.{name}.override.{section}: {leaf}"
    return f"families.{name}: {full_name}"


def family_files() -> dict[str, Path]:
    """The families that come with the package: name to search-space file."""
    folder = bundled.folder("search_spaces")
    return {
        path.stem: path
        for place in (folder, *(folder / section for section in OWN_SECTIONS))
        for path in sorted(place.glob("*.yaml"))
        if path.name != CLAIMS
    }


def read_family(space_name: str, path: str, renaming: Renaming | None = None) -> tuple[str, Space]:
    """(paper, full names to domains) of a search-space file, by name or by path; raises SpecError."""
    known = family_files()
    file = known.get(space_name) or Path(space_name)
    if file.suffix not in YAML:
        raise SpecError(f"{path}.space: no family {space_name!r}{nearest(space_name, known)}")
    raw = dict(_read_yaml(file, f"named by {path}.space; `dmlstudy families` lists the ready ones"))
    paper = str(raw.pop("paper", ""))
    try:
        raw = (renaming or Renaming()).sections(raw, f"{file.name}: ")
    except ValueError as error:
        raise SpecError(error) from None
    return paper, _read_sections({"loss": raw.pop("loss", None)} | raw, file.name)


def tree(space: Space) -> list[str]:
    """The space of a family as indented lines, for people."""
    return [line for full_name, domain in space.items() for line in domain.lines(full_name)]


def parameters(space: Space) -> list[str]:
    """Parameters of a family's loss and regulariser: a line for each name they can have."""
    lines: list[str] = []
    for section, sign in (("loss", ""), ("regularizer", "+ ")):
        within = _section(space, section)
        name = within.pop("name", None)
        if isinstance(name, Choice):
            lines += [_line(f"{sign}{option}", [*own, *within]) for option, own in name.options.items()]
        elif isinstance(name, Fixed):
            lines.append(", ".join(within) if section == "loss" else _line(f"{sign}{name.value}", within))
    return lines


def _line(title: str, items: Iterable[str]) -> str:
    return f"{title}: {', '.join(items)}".removesuffix(": ")


def _section(space: Space, section: str) -> dict[str, Domain]:
    """The part of a family's space that stands in one section, without the section's name."""
    prefix = f"{section}."
    return {name.removeprefix(prefix): domain for name, domain in space.items() if name.startswith(prefix)}


def _named(values: Mapping[str, Scalar | None]) -> LossConfig:
    params = {name: value for name, value in values.items() if name != "name" and value is not None}
    numbers = {name: spaces.as_number(value) for name, value in params.items()}
    return LossConfig.model_validate({"name": str(values["name"]), "params": numbers})


def _read_sections(sections: Mapping[str, Any], where: str) -> Space:
    space: dict[str, Domain] = {}
    for section, mapping in sections.items():
        if section not in NAMED and section not in SECTIONS:
            raise SpecError(
                f"{where}: {section}: unknown key{nearest(section, (*NAMED, 'paper', *SECTIONS))}"
            )
        path = f"{where}: {section}" if where else section
        if section in SECTIONS and isinstance(mapping, Mapping):
            mapping = {name: number_list(f"{section}.{name}", value) for name, value in mapping.items()}
        domains = _read_named(mapping, path) if section in NAMED else _read_space(mapping, path)
        if section in SECTIONS:
            for name in spaces.names(domains):
                known = SECTIONS[section].model_fields
                if name not in known:
                    raise SpecError(f"{path}.{name}: unknown key{nearest(name, known)}")
        space |= {f"{section}.{name}": domain for name, domain in domains.items()}
    return space


def _read_space(mapping: object, path: str) -> Space:
    try:
        return spaces.parse_space(mapping, path)
    except ValueError as error:
        raise SpecError(str(error)) from None


def _read_named(mapping: object, path: str) -> Space:
    if not isinstance(mapping, Mapping) or "name" not in mapping:
        raise SpecError(f"{path}: expected a mapping with the key name")
    space = _read_space(mapping, path)
    _check_name(space["name"], path)
    return space


def _check_name(name: Domain, path: str) -> None:
    values = [name.value] if isinstance(name, Fixed) else name.edges
    if not all(isinstance(value, str) for value in values):
        raise SpecError(f"{path}.name: expected a name or a choice of names")


def _family(name: str, entry: FamilyEntry, file: StudyFile, path: str, renaming: Renaming) -> Family:
    paper, space = read_family(entry.space, path, renaming)
    own = {section: getattr(file, section) for section in SECTIONS}
    space = {**space, **_read_sections(own, "")}
    if file.regularizer:
        space = _with_section(space, "regularizer", _read_named(file.regularizer, "regularizer"))
    for full_name, value in entry.override.items():
        where = f"{path}.override.{full_name}"
        if full_name == "regularizer":
            space = _with_section(space, "regularizer", _read_named(value, where))
            continue
        section, _, leaf = full_name.partition(".")
        if section not in (*NAMED, *SECTIONS) or not leaf:
            raise SpecError(f"{where}: expected section.parameter, as in loss.weighting or training.lr")
        within = _overridden(_section(space, section), section, leaf, value, where)
        space = _with_section(space, section, within)
    if space.get("regularizer.name") == Fixed(NO_REGULARIZER):
        space = _with_section(space, "regularizer", {})
    return Family(name, paper, space)


def _overridden(within: Space, section: str, name: str, value: object, where: str) -> Space:
    """A section with the parameter ``name`` or ``name@option`` replaced, or added where its record has it."""
    if section == "regularizer" and not within:
        raise SpecError(f"{where}: the family has no regularizer; override regularizer: {{name: ...}} first")
    try:
        domain = spaces.parse_domain(number_list(f"{section}.{name.partition('@')[0]}", value), where)
    except ValueError as error:
        raise SpecError(str(error)) from None
    try:
        changed = spaces.replace(within, name, domain)
    except ValueError as error:
        # A name of another option brings parameters that nobody knows; a number is a number.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        own = f"; for one of your own write {{choice: [{value}]}}" if is_number else ""
        raise SpecError(f"{where}: {error}{own}") from None
    except KeyError:
        known: Iterable[str] = spaces.names(within)
        if "@" in name:
            known = spaces.names_under_options(within) or known
        elif section in SECTIONS:
            known = SECTIONS[section].model_fields
        added = _parameters_of(section, within) if section in NAMED and "@" not in name else set(known)
        if name not in added:
            known = sorted({*known, *added}) if section in NAMED else known
            raise SpecError(f"{where}: unknown parameter{nearest(name, known)}") from None
        changed = {**within, name: domain}
    try:
        spaces.check_names(changed, where)
    except ValueError as error:
        raise SpecError(str(error)) from None
    if section in NAMED:
        _check_name(changed["name"], where.rpartition(".")[0])
    return changed


def _parameters_of(section: str, within: Space) -> set[str]:
    """The parameters that every loss (or regulariser) has that the section may name; none of unknown ones."""
    from dmlstudy.losses import catalogue

    of_each = catalogue.parameters_of if section == "loss" else catalogue.parameters_of_regularizer
    name = within["name"]
    names = [name.value] if isinstance(name, Fixed) else list(name.edges)
    try:
        return set.intersection(*(set(of_each(str(each))) for each in names))
    except ValueError:
        return set()


def _with_section(space: Space, section: str, within: Space) -> Space:
    """A family's space with one section replaced."""
    others = {name: domain for name, domain in space.items() if not name.startswith(f"{section}.")}
    return others | {f"{section}.{name}": domain for name, domain in within.items()}


class _Answers:
    """A suggester that answers with a given point of the space."""

    def __init__(self, point: Mapping[str, Scalar]) -> None:
        self.point = point

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        return float(self.point[name])

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self.point[name])

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.point[name]


def default_values(family: Family) -> dict[str, Scalar | None]:
    """Full names to values at the family's default point."""
    return family.sample(_Answers(family.default_point()))


def _read_yaml(path: Path, what: str) -> Mapping[str, Any]:
    try:
        return yaml_file.read(path, what)
    except yaml_file.YamlError as error:
        raise SpecError(error) from None


def _record(record: type[R], value: object, path: str) -> R:
    try:
        return record.model_validate(value)
    except ValidationError as error:
        raise SpecError(_first_fault(error, record, path)) from None


def _first_fault(error: ValidationError, record: type[BaseModel], path: str) -> str:
    """The first thing that is wrong; an unknown key before a missing one, which it may well be meant for."""
    found = error.errors(include_url=False, include_context=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    unwanted = ("constrained", "literal[", "[key]", FIXED, IN_STEPS, BY_RULE, LISTED)
    location = [str(part) for part in first["loc"] if not str(part).startswith(unwanted)]
    where = ".".join([path, *location] if path else location)
    if first["type"] == "extra_forbidden":
        fields = _fields_at(record, location[:-1])
        return f"{where}: unknown key{nearest(location[-1], fields)}"
    message = WORDS.get(first["type"], first["msg"])
    if first["type"] == "missing":
        return f"{where}: is missing; add it"
    return f"{where}: {message[0].lower()}{message[1:]}, got {shown(first['input'])}"


def _fields_at(record: type[BaseModel], location: list[str]) -> list[str]:
    for part in location:
        field = record.model_fields.get(part)
        if field is None:
            continue
        for candidate in _models_in(field.annotation):
            record = candidate
            break
    return [field.alias or name for name, field in record.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in getattr(annotation, "__args__", ()) for model in _models_in(arg)]
