"""The tour, from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import dmlstudy

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "jobs" / "tour.ipynb"


@pytest.mark.timeout(1500)
def test_the_tour_goes_from_pictures_to_a_served_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel knows of no test, as one that a reader starts."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "platform"), os.environ.get("PYTHONPATH", "")])
    )
    tour = nbformat.read(TOUR, as_version=4)
    cells = [cell for cell in tour.cells if cell.cell_type == "code"]
    assert len(cells) == 10
    assert not any(cell.outputs for cell in cells)
    (tmp_path / "search_spaces").symlink_to(ROOT / "search_spaces")
    NotebookClient(tour, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()

    study = dmlstudy.load(tmp_path / "store", "tour")
    assert study.status == "finished"
    assert study.model is not None
    assert study.trials()["status"].value_counts().to_dict() == {"finished": 3, "pruned": 3}
    assert (tmp_path / "tour.html").is_file()
    red = [output.text for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert not any("ipywidgets" in text for text in red), red
    told = "".join(str(output.get("text", "")) for output in cells[8].outputs)
    share = int(told.partition("%")[0].split()[-1])
    assert 30 <= share <= 100, told  # by chance one of 60 characters: 2%
    answer = str(cells[9].outputs[-1].data["text/plain"])
    assert answer.count("'rank'") == 3
    assert "'label': 'character-" in answer
