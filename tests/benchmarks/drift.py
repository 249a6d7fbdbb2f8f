"""What re-opening is worth after a drift: OAHU on digits whose classes are dealt anew half-way, over ten seeds.

    .venv/bin/python tests/benchmarks/drift.py                      about 8 minutes
    .venv/bin/python tests/benchmarks/drift.py --first 10 --seeds 30 --eta 0.05

A stream is 6,000 triplets of scikit-learn's digits by five classes of two digits each, then 6,000 by five other
classes: which digits belong together is drawn anew. The AUC of comparing held-out pairs by the new classes is taken
at the end: of the learner alone, of one that begins anew as soon as drift is heard (by hand), and of
``on_drift="reopen"``. Mean with a 95% t-interval over seeds, and the paired difference from the learner alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "platform"))
from dmlstudy import online
from dmlstudy.online import constraints, stream
from dmlstudy.online.drift import Watch
from dmlstudy.registry.estimates import Estimate

HALF, TRAIN, PAIRS = 6000, 1000, 2000


def ends(seed: int, eta: float) -> list[float]:
    """AUC by the new classes: alone, anew at once, with a race. When drift was heard goes to stderr."""
    digits = load_digits()
    x_ND = digits.data - digits.data.mean(axis=0)
    x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x_ND))
    train, held_out = order[:TRAIN], order[TRAIN:]
    classes = [digits.target // 2, rng.permutation(10)[digits.target] // 2]
    triplets = np.concatenate(
        [train[constraints.sample_triplets(each[train], HALF, rng).index_TC] for each in classes]
    )
    indexed = constraints.IndexedConstraints(triplets)
    pairs = constraints.sample_pairs(classes[1][held_out], PAIRS, rng)
    one, other = (x_ND[held_out[column]] for column in pairs.index_TC.T)

    def auc(learner: online.OnlineLearner) -> float:
        return online.roc_auc(online.dissimilarity(learner, one, other), pairs.is_similar_T)

    def source(position: int) -> Iterator[online.Constraints]:
        return constraints.IndexedConstraints(triplets[position:]).blocks(x_ND, stream.BLOCK)

    def fresh() -> online.OAHU:
        return online.OAHU(x_ND.shape[1], seed=seed, eta=eta)

    alone, anew, raced = fresh(), fresh(), fresh()
    stream.learn(alone, source)
    watch = Watch(0.002)
    num_heard = 0
    for block in indexed.blocks(x_ND, stream.BLOCK):
        if watch.update(anew.partial_fit(block)):
            num_heard += 1
            anew.restore(anew.anew(num_heard).state())
    end = stream.learn(raced, source, on_drift="reopen")
    print(
        f"seed {seed}, eta {eta:g}: heard at {list(end.drifts)}, fresh learner took over at {list(end.reopened)}",
        file=sys.stderr,
        flush=True,
    )
    return [auc(alone), auc(anew), auc(raced)]


def interval(values: np.ndarray, sign: str = "") -> str:
    estimate = Estimate.of(values.tolist())
    return f"{estimate.mean:{sign}.3f}" + (
        "" if estimate.half_width is None else f" ± {estimate.half_width:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--eta", type=float, nargs="+", default=[0.05, 0.3])
    options = parser.parse_args()
    print("| eta | after drift | AUC at the end | from the learner alone |")
    print("|---:|---|---:|---:|")
    for eta in options.eta:
        found = np.array([ends(options.first + number, eta) for number in range(options.seeds)])
        for name, values in zip(("goes on", "begins anew at once", "reopen: a race"), found.T, strict=True):
            print(
                f"| {eta:g} | {name} | {interval(values)} | {interval(values - found[:, 0], '+')} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
