"""Time and memory of the losses, against pytorch-metric-learning on the same tensors, in one run.

    .venv/bin/python tests/benchmarks/losses.py                      the whole table, about 20 minutes on 2 cores
    .venv/bin/python tests/benchmarks/losses.py contrastive --sizes 1024

Each cell is one forward and backward of N unit vectors of size D, 4 per class. Both sides run in one process by
turns, ours first in one round and theirs first in the next, and the median of 7 rounds after a warm-up is
shown, with ``--processor`` of the processor's time. Peak memory is what one call adds to the resident memory of a
process forked for it alone.

Where the other side has the same definition, the two values must agree to 1e-3, or the run fails. It is the library,
or plain PyTorch where that has no such loss. A side that needs more than the limits of time or memory is not run, and
the table says so.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytorch_metric_learning as library
import torch
from fresh import Found, cost_in_fresh_process
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings
from dmlstudy.records import Scalar

PER_CLASS = 4
ROUNDS = 7
LIMIT_SECONDS, LIMIT_GIB = 60, 14
Theirs = Callable[[int, int], Callable[[Tensor, Tensor], Tensor]]


@dataclass(frozen=True)
class Contest:
    """One of our losses, and what a user of the library would write for it; None: the library has none."""

    loss: str
    params: dict[str, Scalar]
    theirs: Theirs | None
    same_value: bool = False


def plain(loss: Callable[..., Tensor]) -> Theirs:
    return lambda num_classes, dim: loss


def mined(loss: Callable[..., Tensor], miner: Callable[[Tensor, Tensor], object]) -> Theirs:
    return lambda num_classes, dim: lambda z, y: loss(z, y, miner(z, y))


def proxied(kind: type[nn.Module], **params: float) -> Theirs:
    return lambda num_classes, dim: kind(num_classes=num_classes, embedding_size=dim, **params)


def pairs_of(y_N: Tensor) -> tuple[Tensor, Tensor]:
    """Positive and negative pairs, as one writes them in PyTorch."""
    same_NN = y_N[:, None] == y_N
    return same_NN & ~torch.eye(len(y_N), dtype=torch.bool), ~same_NN


def plain_siglip(z_ND: Tensor, y_N: Tensor) -> Tensor:
    positive_NN, negative_NN = pairs_of(y_N)
    u_NN = 10 * z_ND @ z_ND.T - 10
    return (
        functional.softplus(-u_NN)[positive_NN].sum() + functional.softplus(u_NN)[negative_NN].sum()
    ) / len(z_ND)


def places_of_positives(y_N: Tensor) -> Tensor:
    """Each row's positives, of which all rows have equally many."""
    return pairs_of(y_N)[0].nonzero()[:, 1].view(len(y_N), -1)


def plain_sup_ap(z_ND: Tensor, y_N: Tensor) -> Tensor:
    """One positive of each row at a time, against all others."""
    positive_NN, negative_NN = pairs_of(y_N)
    s_NN = z_ND @ z_ND.T
    tau, rho, delta, start = 0.01, 100.0, 0.05, 0.5
    offset = start + 1 / (1 + math.exp(-delta / tau))
    precision = 0.0
    for place_N in places_of_positives(y_N).T:
        x_NN = s_NN - s_NN.gather(1, place_N[:, None])
        soft_NN = (x_NN / tau).sigmoid()
        above_NN = torch.where(x_NN > delta, rho * (x_NN - delta) + offset, soft_NN + start * (x_NN > 0))
        others_NN = positive_NN.scatter(1, place_N[:, None], False)
        rank_N = 1 + ((x_NN.detach() >= -1e-6) & others_NN).sum(1)
        precision = precision + (rank_N / (rank_N + (above_NN * negative_NN).sum(1))).sum()
    return 1 - precision / positive_NN.sum()


def plain_recall(z_ND: Tensor, y_N: Tensor) -> Tensor:
    """One positive of each row at a time, against all others."""
    positive_NN, negative_NN = pairs_of(y_N)
    s_NN = z_ND @ z_ND.T
    ranks = []
    for place_N in places_of_positives(y_N).T:
        others_NN = (positive_NN | negative_NN).scatter(1, place_N[:, None], False)
        x_NN = s_NN - s_NN.gather(1, place_N[:, None])
        ranks.append(1 + ((x_NN / 0.01).sigmoid() * others_NN).sum(1))
    rank_NP = torch.stack(ranks, dim=1)
    recall = 0.0
    for k in (1, 2, 4, 8, 16):
        found_N = (k - rank_NP).sigmoid().sum(1).clamp(max=k)
        recall = recall + (found_N / min(k, rank_NP.shape[1])).mean() / 5
    return 1 - recall


def plain_field(z_ND: Tensor, y_N: Tensor) -> Tensor:
    positive_NN, negative_NN = pairs_of(y_N)
    d_NN = (2 - 2 * z_ND @ z_ND.T).clamp(min=1e-12).sqrt()
    delta = 0.2
    pull_NN = -((delta / d_NN.clamp(min=delta)) ** 4)
    push_NN = (delta / d_NN.clamp(0.1 * delta, delta)) ** 4 - 1
    return (pull_NN[positive_NN].sum() + push_NN[negative_NN].sum()) / len(z_ND)


CONTESTS: dict[str, Contest] = {
    "contrastive": Contest("contrastive", {}, plain(pml.ContrastiveLoss(0, 0.8))),
    "multi-similarity + miner": Contest(
        "multi_similarity",
        {},
        mined(pml.MultiSimilarityLoss(2, 50, 0.5), miners.MultiSimilarityMiner(0.1)),
        True,
    ),
    "triplet, all": Contest("triplet", {}, plain(pml.TripletMarginLoss(0.2)), True),
    "triplet, semi-hard": Contest(
        "triplet",
        {"mining": "semi_hard"},
        mined(pml.TripletMarginLoss(0.2), miners.TripletMarginMiner(0.2, "semihard")),
        True,
    ),
    "triplet, batch-hard": Contest(
        "triplet", {"mining": "batch_hard"}, mined(pml.TripletMarginLoss(0.2), miners.BatchHardMiner()), True
    ),
    "lifted structure": Contest("lifted_structure", {}, plain(pml.LiftedStructureLoss(1, 0)), True),
    "lifted structure, GPW form": Contest("lifted_structure_gpw", {}, None),
    "generalized lifted": Contest(
        "generalized_lifted_structure", {}, plain(pml.GeneralizedLiftedStructureLoss(1, 0))
    ),
    "margin": Contest("margin", {}, plain(pml.MarginLoss(0.2, 0, 1.2))),
    "ranked list": Contest("ranked_list", {}, plain(pml.RankedListLoss(0.4, Tn=10, alpha=1.2))),
    "circle": Contest("circle", {}, plain(pml.CircleLoss(0.4, 80)), True),
    "angular": Contest("angular", {}, plain(pml.AngularLoss(40))),
    "smooth AP": Contest("smooth_ap", {"count_self": True}, plain(pml.SmoothAPLoss(0.01))),
    "SupCon": Contest("supcon", {"average": "with_positive"}, plain(pml.SupConLoss(0.1)), True),
    "NT-Xent": Contest("supcon", {"denominator": "negatives"}, plain(pml.NTXentLoss(0.1)), True),
    "SigLIP": Contest("siglip", {"learn": False}, plain(plain_siglip), True),
    "TCM": Contest("tcm", {}, plain(pml.ThresholdConsistentMarginLoss()), True),
    "SupAP": Contest("sup_ap", {}, plain(plain_sup_ap), True),
    "recall at k": Contest("recall_at_k", {}, plain(plain_recall), True),
    "recall at k, SiMix": Contest("recall_at_k", {"simix": True}, None),
    "n-pair, one pair per class": Contest(
        "n_pair", {"positive": "one_per_class", "l2": 0.0}, plain(pml.NPairsLoss())
    ),
    "n-pair, all": Contest("n_pair", {}, None),
    "proxy-NCA++": Contest("proxy_nca_pp", {}, proxied(pml.ProxyNCALoss, softmax_scale=9)),
    "proxy-anchor": Contest("proxy_anchor", {}, proxied(pml.ProxyAnchorLoss)),
    "soft-triple": Contest("soft_triple", {}, proxied(pml.SoftTripleLoss)),
    "potential field": Contest("potential_field", {"proxies": 2}, None),
    "potential field, no proxies": Contest("potential_field", {"proxies": 0}, plain(plain_field), True),
    "norm-softmax": Contest("norm_softmax", {}, proxied(pml.NormalizedSoftmaxLoss)),
    "arcface": Contest("arcface", {}, proxied(pml.ArcFaceLoss)),
    "cosface": Contest("cosface", {}, proxied(pml.CosFaceLoss)),
    "pair weighting, exponential": Contest("pair_weighting", {"beta": 10.0}, None),
    "pair weighting, power": Contest("pair_weighting", {"weighting": "power", "p": 1.0, "q": 5.0}, None),
    "triplet weighting, exponential": Contest("triplet_weighting", {}, None),
    "triplet weighting, power": Contest("triplet_weighting", {"weighting": "power"}, None),
    "binomial deviance": Contest("binomial_deviance", {}, None),
    "multi-similarity, distance form": Contest("multi_similarity_distance", {}, None),
}


def batch(n: int, dim: int) -> tuple[Tensor, Tensor]:
    """Unit vectors in loose clusters, in random order, of 16 intrinsic dimensions whatever D is.

    So distances spread as those of trained embeddings do, and some pairs lie beyond every margin at every D.
    """
    generator = torch.Generator().manual_seed(0)
    y_N = (torch.arange(n) // PER_CLASS)[torch.randperm(n, generator=generator)]
    centres = torch.randn(n // PER_CLASS, 16, generator=generator)
    latent = centres[y_N] + 0.8 * torch.randn(n, 16, generator=generator)
    z_ND = latent @ torch.randn(16, dim, generator=generator)
    return functional.normalize(z_ND).requires_grad_(), y_N


def call(contest: Contest, side: str, z_ND: Tensor, y_N: Tensor) -> Callable[[], float]:
    """One forward and backward of that side; returns the value."""
    num_classes, dim = int(y_N.max()) + 1, z_ND.shape[1]
    if side == "ours":
        ours = catalogue.build(contest.loss, contest.params, num_classes=num_classes, dim=dim)
        embeddings = Embeddings(z_ND, y_N, torch.arange(len(y_N)))

        def step() -> float:
            total, count = ours(embeddings)
            value = total / count.clamp(min=1)
            value.backward()
            return value.item()

        return step
    assert contest.theirs is not None
    theirs = contest.theirs(num_classes, dim)

    def their_step() -> float:
        value = theirs(z_ND, y_N)
        value.backward()
        return value.item()

    return their_step


def prepare(name: str, side: str, n: int, dim: int) -> Callable[[], float]:
    """The call whose memory is measured; what libraries allocate at their first call is behind."""
    call(CONTESTS[name], side, *batch(64, dim))()
    return call(CONTESTS[name], side, *batch(n, dim))


def cost(name: str, side: str, n: int, dim: int) -> Found:
    return cost_in_fresh_process(
        functools.partial(prepare, name, side, n, dim), most_seconds=LIMIT_SECONDS, most_gib=LIMIT_GIB
    )


def medians(
    steps: dict[str, Callable[[], float]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each side, by turns."""
    times: dict[str, list[float]] = {side: [] for side in steps}
    for number in range(rounds + 1):
        order = list(steps) if number % 2 else list(reversed(steps))
        for side in order:
            started = clock()
            steps[side]()
            if number:
                times[side].append(clock() - started)
    return {side: statistics.median(seconds) for side, seconds in times.items()}


def sides_of(contest: Contest) -> list[str]:
    return ["ours"] if contest.theirs is None else ["ours", "theirs"]


def row(
    name: str, n: int, dim: int, peaks: dict[str, Found], rounds: int, clock: Callable[[], float]
) -> list[str]:
    """One line of the table; the sides that could be run are timed."""
    z_ND, y_N = batch(n, dim)
    contest = CONTESTS[name]
    steps = {side: call(contest, side, z_ND, y_N) for side in peaks if not isinstance(peaks[side], str)}
    values = {side: step() for side, step in steps.items()}
    if contest.same_value and len(values) == 2:
        gap = abs(values["ours"] - values["theirs"])
        if not abs(values["theirs"]) > 0 or gap > 1e-3 * abs(values["theirs"]):
            raise SystemExit(f"{name}, N={n}, D={dim}: values {values} differ; nothing is compared")
    return [name, str(n), str(dim), *cells(medians(steps, rounds, clock), peaks)]


def cells(seconds: dict[str, float], peaks: dict[str, Found]) -> list[str]:
    def cell(side: str) -> tuple[str, str]:
        if side not in peaks:
            return "-", "-"
        found = peaks[side]
        if isinstance(found, str):
            return found, found
        return f"{1e3 * seconds[side]:.1f}", f"{found[1]:.0f}"

    (our_ms, our_mib), (their_ms, their_mib) = cell("ours"), cell("theirs")
    faster = f"{seconds['theirs'] / seconds['ours']:.1f}x" if len(seconds) == 2 else "-"
    leaner = "-"
    ours, theirs = peaks["ours"], peaks.get("theirs")
    if isinstance(theirs, tuple) and isinstance(ours, tuple):
        leaner = f"{theirs[1] / max(1.0, ours[1]):.1f}x"
    return [our_ms, their_ms, faster, our_mib, their_mib, leaner]


HEAD = ["loss", "N", "D", "ms", "PML ms", "faster", "MiB", "PML MiB", "leaner"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(CONTESTS)}")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096], metavar="N")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512], metavar="D")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--processor", action="store_true", help="time of the processor, which other load changes least"
    )
    options = parser.parse_args()
    names = options.names or list(CONTESTS)
    clock = time.process_time if options.processor else time.perf_counter
    for name in names:
        if name not in CONTESTS:
            parser.error(f"no contest {name!r}; choose from {', '.join(CONTESTS)}")
    grid = [(name, n, dim) for name in names for n in options.sizes for dim in options.dims]
    peaks = {
        (name, n, dim): {side: cost(name, side, n, dim) for side in sides_of(CONTESTS[name])}
        for name, n, dim in grid
    }
    machine = f"{torch.get_num_threads()} threads, {os.cpu_count()} cores, {cpu_name()}"
    print(f"torch {torch.__version__}, pytorch-metric-learning {library.__version__}, {machine}\n")
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "|".join(["---", *["---:"] * (len(HEAD) - 1)]) + "|")
    for place in grid:
        print("| " + " | ".join(row(*place, peaks[place], options.rounds, clock)) + " |", flush=True)


def cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        models = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return models[0] if models else platform.machine()


if __name__ == "__main__":
    main()
