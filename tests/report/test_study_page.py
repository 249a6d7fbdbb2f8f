"""The page of a study, from whole ones to those of which little is known; on a phone it does not scroll sideways."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial
from support.loaded_page import parsed
from support.made_study import Maker

from dmlstudy import cli
from dmlstudy.registry import connection
from dmlstudy.report.study_page import write_report
from dmlstudy.search.warm_start import RANKINGS, WARM_START, PointRanks, stored_weights
from dmlstudy.store import Store

PARTS = [
    "leaderboard",
    "pairs",
    "search",
    "curves",
    "examples",
    "map",
    "distances",
    "cost",
    "reproduce",
]


def words_of(path: Path) -> str:
    """A page's text, without its scripts and style."""
    text = re.sub(r"<(script|style)>.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"<[^>]*>", " ", text).replace("\u00a0", " ")


@pytest.fixture(scope="module")
def page(small: Maker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "small.html"
    written = write_report(small.store, "small", path)
    assert (written.num_families, written.notice) == (4, "")
    return path


def test_every_part_is_there_and_nothing_is_loaded(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'<section id="([^"]*)"', text) == PARTS
    found = parsed(text)
    assert found.loaded == []
    assert found.handlers == []
    assert len(found.scripts) == 2
    assert "link" not in found.tags
    assert "iframe" not in found.tags
    assert "Not shown" not in text
    shown = words_of(page)
    news = shown.index("alpha wins and beats the untrained embedder on these classes by 0.4600")
    assert news < shown.index("alpha wins by validation map_at_r 0.7000; on the test classes it has 0.6100")
    assert "and is better than the runner-up beta on these classes: +0.1000" in shown
    assert "Not finished" not in shown


def test_little_is_said_of_a_family_where_there_is_little(page: Path) -> None:
    shown = words_of(page)
    assert "No trial finished (0 finished, 0 stopped early, 1 failed), so there is nothing to draw." in shown
    assert "The first failed with: loss is not finite &lt;b&gt;" in shown
    assert "Families without a searched parameter" in shown
    assert "it takes 4 finished trials" not in shown
    assert "5 finished, 1 stopped early, 0 failed. Best: #3, 0.7000, with training.lr = 0.004" in shown


def test_the_page_is_kept_with_the_studys_run(small: Maker, page: Path, tmp_path: Path) -> None:
    client = connection.connect(small.store)
    kept = client.download_artifacts(small.tracker.parent_id, "report.html", str(tmp_path))
    assert Path(kept).read_bytes() == page.read_bytes()
    assert client.get_run(small.tracker.parent_id).info.status == "FINISHED"


def test_examples_can_be_left_out(small: Maker, tmp_path: Path) -> None:
    write_report(small.store, "small", tmp_path / "page.html", with_examples=False)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall(r'<section id="([^"]*)"', text) == PARTS
    assert text.count("<p>Not shown: left out by --without-examples.</p>") == 3
    assert "<img" not in text


def test_a_study_of_one_family_that_is_not_finished(store: Store, tmp_path: Path) -> None:
    maker = Maker(store, "begun")
    maker.search("only", "finished", 0.5, {1: 0.4, 2: 0.5}, training__lr=1e-3)
    maker.state("interrupted")
    written = write_report(store, "begun", tmp_path / "page.html")
    assert "`dmlstudy resume begun` goes on" in written.notice
    shown = words_of(tmp_path / "page.html")
    assert shown.index("Not finished.") < shown.index("only leads so far by validation map_at_r 0.5000")
    assert "it was not judged on the test classes yet" in shown
    assert "There are no two families to compare: none was judged on the test classes yet." in shown
    assert "One trial finished, so there is nothing to compare its parameters with." in shown
    assert "Not shown: the study has no winner yet." in shown


def test_a_study_whose_trials_have_all_failed(store: Store, tmp_path: Path) -> None:
    maker = Maker(store, "broken")
    maker.search("only", "failed", None, reason="out of memory", training__lr=1e-3)
    maker.state("failed", reason="no trial finished")
    written = write_report(store, "broken", tmp_path / "page.html")
    assert "The study is failed (no trial finished)" in written.notice
    shown = words_of(tmp_path / "page.html")
    assert "No trial has finished, so there is nothing to tell families by." in shown
    assert "The first failed with: out of memory" in shown
    assert "No trial has told of more than one epoch, so there is no curve." in shown


def test_a_study_that_has_only_begun_and_whose_folder_is_elsewhere(store: Store, tmp_path: Path) -> None:
    Maker(store, "bare", with_state=False)
    written = write_report(store, "bare", tmp_path / "page.html")
    assert "The study is running" in written.notice
    shown = words_of(tmp_path / "page.html")
    assert "No trial of the search has ended" in shown
    assert "not known: the study’s folder is not in this store" in shown


def test_names_cannot_become_markup(store: Store, tmp_path: Path) -> None:
    hostile = """x</script><script>alert('1')</script>"&<img src=y onerror=z>"""
    maker = Maker(store, "a\"b'<img src=q onerror=alert(1)>", with_state=False)
    for family in (hostile, "plain"):
        for number in range(4):
            maker.search(
                family, "finished", 0.1 * number, {1: 0.1, 2: 0.1 * number}, training__lr=1e-3 + number / 1e4
            )
        maker.search(family, "failed", None, reason=hostile)
        for seed in (1, 2):
            maker.judge(family, seed, 0.5 + seed / 10, (2.0, 1.0))
    maker.end(hostile)
    write_report(store, maker.study, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = parsed(text)
    assert len(found.scripts) == 2
    assert found.loaded == []
    assert found.handlers == []
    assert "img" not in found.tags
    assert "<script>alert" not in text
    assert "onerror=z>" not in found.scripts[1]


def test_the_report_says_what_was_taken(store: Store, tmp_path: Path) -> None:
    maker = Maker(store, "later")
    hostile = "<img src=x onerror=y>"
    maker.search("alpha", "finished", 0.5, training__lr=1e-3)
    trial = create_trial(
        value=0.7,
        params={"alpha/training.lr": 2e-3},
        distributions={"alpha/training.lr": FloatDistribution(1e-4, 1e-2, log=True)},
        user_attrs={"family": "alpha", "generation": 1, WARM_START: f"{hostile} #3"},
    )
    maker.optuna.add_trial(trial)
    assert stored_weights(store, "later") == []
    known = PointRanks(
        default={"alpha/training.lr": 1e-3},
        sources=[f"{hostile} #3"],
        ranks={hostile: [0, 1], "none": [1, 0]},
    )
    maker.optuna.set_user_attr(RANKINGS, {"alpha": known.model_dump()})
    written = write_report(store, "later", tmp_path / "page.html", with_examples=False)
    assert [(each.study, each.num_taken, each.num_alike, each.weight) for each in written.earlier] == [
        (hostile, 1, 1, pytest.approx(2.5 / 4)),
        ("none", 0, 0, pytest.approx(0.5 / 4)),
    ]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "From earlier studies" in text
    assert "<img" not in text
    assert "1 of 1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "error: no study 'nope' in the store"),
        (
            ["small", "-o", "/nowhere/page.html"],
            "error: /nowhere: no such folder; make it or name another output",
        ),
    ],
)
def test_wrong_input_is_one_line(
    small: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dmlstudy", "report", *arguments, "--store", str(small.store.root)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err.strip()
    assert shown.startswith(message)
    assert "\n" not in shown
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_page_is_kept(
    small: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "thesis.html"
    path.write_text("<!doctype html><title>of another's hand</title>")
    monkeypatch.setattr(
        sys, "argv", ["dmlstudy", "report", "small", "-o", str(path), "--store", str(small.store.root)]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    refusal = f"error: {path}: exists already and is not a page by dmlstudy; name another output\n"
    assert capsys.readouterr().err == refusal
    assert path.read_text() == "<!doctype html><title>of another's hand</title>"


def test_the_command_says_what_it_wrote_and_what_is_missing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = Maker(store, "stopped")
    maker.search("only", "finished", 0.5)
    maker.state("interrupted")
    path = tmp_path / "page.html"
    monkeypatch.setattr(
        sys, "argv", ["dmlstudy", "report", "stopped", "-o", str(path), "--store", str(store.root)]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    shown = "".join(capsys.readouterr().out.split("\n"))
    assert re.search(r"page\.html: 1 families, \d\.\d MB with all it needs; kept with the study's run", shown)
    assert "not finished: The study is interrupted" in shown
    assert path.is_file()


def test_a_store_that_does_not_take_the_page(
    small: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlflow.MlflowClient.log_text", full)
    written = write_report(small.store, "small", tmp_path / "page.html", with_examples=False)
    assert re.search(r"did not take report.html .*No space left", written.not_kept)
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_no_page_scrolls_sideways_and_every_plot_is_drawn(
    page: Path, tmp_path: Path, width: int, chromium: str
) -> None:
    """Measured by Chromium, in a frame of the width, for its windows are never narrower than 500 pixels."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"""<!doctype html><iframe src="{page.as_uri()}" style="border:0;width:{width}px;height:3000px"></iframe>
        <output></output><script>
        document.querySelector("iframe").onload = event => {{
          const inner = event.target.contentDocument, root = inner.documentElement
          const drawn = [...inner.querySelectorAll(".plot")].filter(plot => plot.querySelector("svg.main-svg"))
          const wide = [...inner.querySelectorAll(".plot svg")].filter(svg => svg.clientWidth > {width})
          document.querySelector("output").textContent = [root.scrollWidth, root.clientWidth,
            inner.querySelectorAll(".plot").length, drawn.length, wide.length].join(" ")
        }}</script>"""
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 600)},3000"]
    shown = subprocess.run(
        [chromium, *options, "--virtual-time-budget=15000", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    ).stdout
    measured = re.search(r"<output>([\d ]+)</output>", shown)
    assert measured, shown[-2000:]
    scroll_width, client_width, num_plots, num_drawn, num_wide = map(int, measured[1].split())
    assert scroll_width <= client_width <= width
    assert num_plots == num_drawn == 9
    assert num_wide == 0
