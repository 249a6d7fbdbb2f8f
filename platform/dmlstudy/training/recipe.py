"""Keys of a recipe that contradict each other, or that nothing would use, in one line each; reads no torch."""

from __future__ import annotations

from dmlstudy.records import HYPERBOLIC, BatchConfig, TrainingConfig, TrialConfig
from dmlstudy.training import schedule
from dmlstudy.training.exclusions import check_alone
from dmlstudy.training.shares import shares_of

USERS = {
    "lr_floor": ("cosine", "linear"),
    schedule.STEP_AT: (schedule.STEP,),
    "step_factor": (schedule.STEP,),
}
"""The schedules that use a key."""

BY_NORM = ("adaface", "magface")
"""Losses that look at the norms of embeddings before they are normalised."""

EUCLIDEAN = ("triplet", "triplet_weighting", "pair_weighting")
"""Losses by a Euclidean distance, which needs no unit vectors."""


def check_recipe(training: TrainingConfig) -> None:
    """Raise ValueError for a recipe that no model can be trained by, whatever the data."""
    if training.warmup_steps and training.warmup_epochs:
        raise ValueError("training.warmup_steps: stands beside training.warmup_epochs; leave one of them out")
    for key, users in USERS.items():
        value, default = getattr(training, key), TrainingConfig.model_fields[key].default
        if value != default and training.schedule not in users:
            raise ValueError(
                f"training.{key}: {value} is not used by training.schedule: {training.schedule}; leave it out, or put"
                f" it under the options of training.schedule that use it: {' or '.join(users)}"
            )
    if training.loss_lr is not None and training.loss_lr_mult != 1:
        raise ValueError(
            f"training.loss_lr: {training.loss_lr:g} is the rate of the loss's own parameters, and"
            f" training.loss_lr_mult: {training.loss_lr_mult:g} says another; leave one of them out, or set"
            " training.loss_lr_mult: 1 where a family's space gives it"
        )
    # Batches are counted when there is data: until then an epoch is as many as can be.
    planned = schedule.planned(
        training.schedule,
        training.epochs,
        1_000_000,
        warmup_epochs=training.warmup_epochs,
        step_at=training.step_at,
    )
    # A single epoch has no later one: a study that is only tried out may have it.
    if planned.milestones and training.epochs > 1 and min(planned.milestones) >= training.epochs:
        raise ValueError(
            f"training.{schedule.STEP_AT}: {training.step_at} lies beyond training.epochs: {training.epochs}, so that"
            " the rates would never fall; write shares (0.5 0.75), lower it, or train longer"
        )


def check_class_shards(config: TrialConfig) -> None:
    """Raise ValueError, beginning with the key, for what does not go together with shares of classes."""
    if not config.training.class_shards:
        return
    if config.training.precision == "fp16":
        raise ValueError(
            "training.class_shards: under training.precision: fp16 a worker may overflow alone, and leave out a step"
            " that others take; set training.precision to bf16 or float32, or leave training.class_shards out"
        )
    if config.embedder.parts:
        raise ValueError(
            "training.class_shards: embedder.matryoshka cuts class vectors, and shares of them are not cut; leave one"
            " of the two out"
        )


def check_draw(batch: BatchConfig, *, has_classes: bool) -> None:
    """Raise ValueError for one image of each class where a loss has neither class vectors nor a memory."""
    if batch.images_per_class > 1 or batch.draw != "pk" or has_classes or batch.memory_size:
        return
    raise ValueError(
        "batch.images_per_class: 1 leaves this loss without a pair of one class; set it to 2 or more, set"
        " batch.memory_size, or choose a loss with class vectors (cosface, proxy_anchor)"
    )


def check_unfrozen(last: int | str, num_blocks: int) -> None:
    """Raise ValueError where more of the last blocks are to be trained than there are."""
    if last != "all" and int(last) > num_blocks:
        raise ValueError(
            f"training.unfreeze_last: {last} blocks, but the backbone has {num_blocks}; set it to at most {num_blocks},"
            " or to all"
        )


def check_trained_parts(config: TrialConfig) -> None:
    """Raise ValueError where an embedder without a head would have nothing to train for an epoch or more."""
    training = config.training
    if config.embedder.head != "none" or training.epochs == 0:
        return
    for key, frozen in (
        ("unfreeze_last", training.unfreeze_last == 0),
        ("freeze_backbone_epochs", training.freeze_backbone_epochs > 0),
    ):
        if frozen:
            raise ValueError(
                f"training.{key}: {getattr(training, key)} freezes the backbone, and embedder.head: none leaves nothing"
                " else to train; set embedder.head: linear, or leave the key out"
            )


def check_chunk_and_share(config: TrialConfig) -> None:
    """Raise ValueError, beginning with the key, for settings of training that do not go together."""
    chunk, embedder = config.batch.chunk, config.embedder
    given = config.training.wise_ft
    least, shown = min(shares_of(given)), given if isinstance(given, str) else f"{given:g}"
    if chunk is not None and not embedder.freeze_bn:
        raise ValueError(
            f"batch.chunk: {chunk} cannot give the batch statistics of a whole batch; set embedder.freeze_bn: true, or"
            " leave batch.chunk out"
        )
    if least < 1 and not embedder.freeze_bn:
        raise ValueError(
            f"training.wise_ft: {shown} would mix weights of different batch statistics; set embedder.freeze_bn:"
            " true, or leave training.wise_ft out"
        )
    if least < 1 and embedder.structure_input != "none":
        raise ValueError(
            f"training.wise_ft: {shown} would give a structure head features of other weights than the running mean of"
            f" embedder.structure_input: {embedder.structure_input} is of; leave one of them out"
        )
    if config.training.l2_sp and (embedder.weights is None or config.training.adapter != "none"):
        why = "these are random" if embedder.weights is None else "adapters leave them as they are"
        fix = "set embedder.weights" if embedder.weights is None else "set training.adapter: none"
        raise ValueError(
            f"training.l2_sp: {config.training.l2_sp:g} draws weights to those they began as, and {why}; {fix}, or"
            " leave training.l2_sp out"
        )
    if least < 1 and embedder.weights is None:
        raise ValueError(
            f"training.wise_ft: {shown} mixes the trained weights with those they began as, and these are random; set"
            " embedder.weights, or leave training.wise_ft out"
        )


def check_heads(config: TrialConfig) -> None:
    """Raise ValueError, beginning with the key, for keys of heads that the trial's embedder does not have."""
    embedder, regularizer = config.embedder, config.regularizer
    if embedder.dim_per == "head" and embedder.fusion not in ("heads", "unit_heads"):
        raise ValueError(
            f"embedder.dim_per: head needs a head for each stage, and embedder.fusion: {embedder.fusion} has one in"
            " all; set embedder.fusion: heads, or leave embedder.dim_per out"
        )
    if embedder.space == "ball":
        _check_in_a_ball(config)
    elif config.loss.params.get("distance") == HYPERBOLIC:
        raise ValueError(
            "loss.distance: hyperbolic needs points of a ball: on the sphere its order is that of the cosine; set"
            " embedder.space: ball, or another distance"
        )
    if not embedder.unit_norm:
        _check_off_the_sphere(config)
    retained = "" if regularizer is None else f"{regularizer.name} {regularizer.params.get('of', 'features')}"
    if retained == "retention features" and config.training.unfreeze_last == 0:
        raise ValueError(
            "regularizer.of: features of a frozen backbone (training.unfreeze_last: 0) are the start's already;"
            " leave the regularizer out, or set of: embedding"
        )
    _check_norms(config)
    multiple = config.training.structure_lr_mult
    of_structure = [] if multiple is None else [f"training.structure_lr_mult: {multiple:g}"]
    if embedder.structure_input != "none":
        of_structure.append(f"embedder.structure_input: {embedder.structure_input}")
    if of_structure and (regularizer is None or regularizer.name != "structure"):
        raise ValueError(
            f"{of_structure[0]} is of a structure head, which the regularizer structure trains; set regularizer.name:"
            " structure, or leave it out"
        )


def _check_norms(config: TrialConfig) -> None:
    """Raise ValueError where a loss looks at norms, and those of all embeddings would be the same."""
    embedder = config.embedder
    if config.loss.name not in BY_NORM:
        return
    check_alone(
        f"loss.name: {config.loss.name} learns from the norms of embeddings, which",
        {
            "embedder.head_depth": embedder.head_depth,
            "embedder.code": embedder.code != "none" and embedder.code,
            "embedder.fusion": embedder.fusion == "unit_heads" and embedder.fusion,
        },
        "with it all are one: leave it out, or choose a loss that does not look at them (arcface)",
    )


def _check_off_the_sphere(config: TrialConfig) -> None:
    """Raise ValueError for what embeddings that are not of unit norm have no meaning for."""
    embedder, regularizer = config.embedder, config.regularizer
    others = {
        "loss.name": config.loss.name not in EUCLIDEAN and config.loss.name,
        "regularizer.name": regularizer is not None and regularizer.name != "structure" and regularizer.name,
        "batch.memory_size": config.batch.memory_size,
        "embedder.head_depth": embedder.head_depth,
        "embedder.code": embedder.code != "none" and embedder.code,
        "protocol.verification": config.verification and "true",
    }
    remedy = (
        f"set loss.name to one of {', '.join(EUCLIDEAN)}, without memory, codes, layers, verification or a regularizer"
        " other than structure, or leave it out"
    )
    check_alone("embedder.unit_norm: false", others, remedy)


def _check_in_a_ball(config: TrialConfig) -> None:
    """Raise ValueError for what points of a ball have no meaning for."""
    embedder, regularizer, rerank = config.embedder, config.regularizer, config.retrieval.rerank
    if config.loss.params.get("distance") != HYPERBOLIC:
        raise ValueError(
            f"embedder.space: ball is compared by hyperbolic distance, which loss.name: {config.loss.name} is not set"
            f" to; set loss.distance: hyperbolic with {', '.join(EUCLIDEAN)} or supcon, or leave it out"
        )
    others = {
        "regularizer.name": regularizer is not None and regularizer.name,
        "embedder.unit_norm": not embedder.unit_norm and "false",
        "embedder.head_depth": embedder.head_depth,
        "embedder.code": embedder.code != "none" and embedder.code,
        "retrieval.rerank": rerank != "none" and rerank,
        "protocol.verification": config.verification and "true",
        "protocol.clusters": config.clusters and "true",
    }
    check_alone("embedder.space: ball", others)
