"""A pulled model is there whole or not at all, and a killed pull leaves nothing that the next does not remove."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmlstudy.registry import drafts
from dmlstudy.store import StoreError


def model(folder: Path, content: str = "old") -> Path:
    folder.mkdir()
    (folder / "weights.safetensors").write_text(content)
    (folder / "embedder.json").write_text("{}")
    (folder / "manifest.json").write_text('{"weights.safetensors": "1", "embedder.json": "2"}')
    return folder


def pulled(to: Path, *, replace: bool = False) -> None:
    drafts.check_place(to, replace=replace)
    with drafts.draft(to) as scratch:
        drafts.put(model(scratch / "new", "new"), to, replace=replace)


def test_a_model_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    model(tmp_path / "model")
    with pytest.raises(
        StoreError, match="model: exists already; name a new folder with --to, or replace a model with"
    ):
        pulled(tmp_path / "model")
    pulled(tmp_path / "model", replace=True)
    pulled(tmp_path / "other", replace=True)
    for name in ("model", "other"):
        assert (tmp_path / name / "weights.safetensors").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_is_replaced_stays_where_the_new_one_cannot_be_put(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(drafts, "RENAME_EXCHANGE", 1 << 20)  # flags that no kernel knows
    model(tmp_path / "model")
    pulled(tmp_path / "model", replace=True)
    assert (tmp_path / "model" / "weights.safetensors").read_text() == "new"
    with pytest.raises(FileNotFoundError), drafts.draft(tmp_path / "model") as scratch:
        drafts.put(scratch / "missing", tmp_path / "model", replace=True)
    assert (tmp_path / "model" / "weights.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nothing_but_a_model_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    model(tmp_path / "with notes")
    (tmp_path / "with notes" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(model(tmp_path / "model"))
    (tmp_path / "empty").mkdir()
    for name in ("file", "folder", "link"):
        with pytest.raises(StoreError, match=f"{name}: is not the folder of a model"):
            pulled(tmp_path / name, replace=True)
    with pytest.raises(StoreError, match=r"notes\.txt: no file of the model there; move it away"):
        pulled(tmp_path / "with notes", replace=True)
    pulled(tmp_path / "empty", replace=True)
    assert (tmp_path / "folder" / "thesis.tex").read_text() == "mine"
    assert (tmp_path / "with notes" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "model" / "weights.safetensors").read_text() == "old"


PULLING = """
import sys, time
from pathlib import Path
from dmlstudy.registry import drafts
with drafts.draft(Path(sys.argv[1])) as scratch:
    (scratch / "weights.safetensors").write_text("half")
    print("ready", flush=True)
    time.sleep(300)
"""


def test_the_draft_of_a_killed_pull_is_removed_by_the_next_but_not_one_at_work(tmp_path: Path) -> None:
    def begun() -> subprocess.Popen[Any]:
        process = subprocess.Popen(
            [sys.executable, "-c", PULLING, tmp_path / "model"], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    first, second = begun(), begun()
    try:
        left = {path.name for path in tmp_path.iterdir()}
        assert len(left) == 2
        first.send_signal(signal.SIGKILL)
        first.wait()
        (tmp_path / ".pull-justbegun").mkdir()
        (tmp_path / ".pull-ofold").mkdir()
        os.utime(tmp_path / ".pull-ofold", (0, 0))
        pulled(tmp_path / "other")
        there = {path.name for path in tmp_path.iterdir()}
        assert "other" in there
        assert ".pull-justbegun" in there
        assert ".pull-ofold" not in there
        assert len(there & left) == 1, "the draft of a pull at work is gone, or the killed one's is there"
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def test_a_draft_that_goes_away_while_it_is_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".pull-x"
    left.mkdir()

    def gone(folder: Path) -> list[Path]:
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr(Path, "iterdir", gone)
    assert not drafts.is_left(left)
    assert not drafts.is_left(tmp_path / ".pull-y")
