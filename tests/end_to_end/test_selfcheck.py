"""``dmlstudy selfcheck``: the law of the training step, checked on real Ray Train workers."""

from __future__ import annotations

import re

import pytest

from dmlstudy.training.exactness import CASES

from .conftest import called, command

pytestmark = pytest.mark.timeout(300)


def test_two_workers_are_found_exact() -> None:
    result = command("selfcheck", "margin", "structure", "proxy_anchor")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = re.findall(r"^(.*?) {2,}\S+ +\S+ +(1\.0{10}) +(1\.0{10}) +exact$", result.stdout, re.MULTILINE)
    wanted = {"margin", "structure", "proxy_anchor"}
    names = [name for name, case in CASES.items() if wanted & {case.loss, (case.regularizer or ("",))[0]}]
    assert [row[0] for row in rows] == names
    assert f"all {len(names)} are exact on 2 workers" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["margni"], "no loss 'margni'; did you mean 'margin'"),
        (["--cpus-per-worker", "0"], "--cpus-per-worker: Input should be greater than 0"),
        (["--workers", "999"], "999 workers .* the cluster .* holds"),
    ],
)
def test_what_cannot_be_checked_is_said_in_one_line(arguments: list[str], message: str) -> None:
    result = called("selfcheck", *arguments)
    assert result.returncode == 2
    assert re.fullmatch(f"error: .*{message}.*\n", result.stderr)
