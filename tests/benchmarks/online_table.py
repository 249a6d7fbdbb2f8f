"""The CIFAR-10 column of OAHU's Table 3 beside the paper's numbers, from a study that has been run.

    dmlstudy run search_spaces/studies/cifar10_online.yaml
    .venv/bin/python tests/benchmarks/online_table.py cifar10-online --store dmlstudy_store

Mean over the verdict's shuffles with a 95% t-interval; the paper has mean and standard deviation over 10 shuffles.
The last column is win/tie/loss of OAHU against the row by the paired t-test on accuracy over the same shuffles, with
Holm's correction for all pairs of the study. The paper's numbers are of its Table 3, two digits each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dmlstudy.registry.leaderboard import Row, leaderboard
from dmlstudy.store import Store
from dmlstudy.verdict.comparison import tallied

PAPER = {  # error rate, macro F1, utilisation: mean, deviation (0.00: below 0.005)
    "lego": ((0.88, 0.00), (0.05, 0.02), (0.59, 0.00)),
    "rdml": ((0.76, 0.01), (0.24, 0.01), (0.50, 0.01)),
    "oasis": ((0.79, 0.02), (0.20, 0.03), (0.47, 0.00)),
    "opml": ((0.83, 0.01), (0.16, 0.00), (0.48, 0.04)),
    "oahu": ((0.68, 0.00), (0.31, 0.00), (1.00, 0.00)),
}
METRICS = ("test_error_rate", "test_macro_f1", "test_utilization")


def cells(row: Row) -> list[str]:
    """Ours, the paper's, and the difference, of each metric."""
    paper = next((values for name, values in PAPER.items() if row.family.partition("-")[0] == name), None)
    found = []
    for place, name in enumerate(METRICS):
        own = row.test.get(name)
        found.append("-" if own is None else f"{own.mean:.3f} ± {own.half_width or 0:.3f}")
        if paper is None or own is None:
            found += ["-", "-"]
        else:
            mean, deviation = paper[place]
            found += [f"{mean:.2f} ± {deviation:.2f}", f"{own.mean - mean:+.3f}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study")
    parser.add_argument("--store", type=Path, default=Path("dmlstudy_store"))
    parser.add_argument("--family", default="oahu", help="whose wins are counted")
    options = parser.parse_args()
    board = leaderboard(Store(options.store.absolute()), options.study)
    outcomes = {rival: str(tally) for rival, tally in tallied([board.comparisons], options.family).items()}
    head = ["method", *(f"{what}{of}" for what in ("error", "F1", "U") for of in ("", ", paper", ", apart"))]
    head.append("win/tie/loss")
    print("| " + " | ".join(head) + " |")
    print("|---|" + "---:|" * (len(head) - 1))
    for row in board.rows:
        print("| " + " | ".join([row.family, *cells(row), outcomes.get(row.family, "-")]) + " |")


if __name__ == "__main__":
    main()
