"""The shell of all pages: what file a page replaces, and that it is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dmlstudy import html
from dmlstudy.report.page import Section
from dmlstudy.report.page import page as report_page
from dmlstudy.serving.contact_sheet import write_sheet

PAGE = html.page("a title", "", "words")


def test_every_page_has_the_same_head_and_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for text in (
        PAGE,
        html.page("x", "", scripts=["1;"]),
        report_page("y", [], [Section("a", "A", ["words"])]),
    ):
        html.write_page(path, text)
        assert path.read_text() == text
    write_sheet(path, "a sheet", [])
    write_sheet(path, "another sheet", [])
    html.write_page(path, PAGE)


@pytest.mark.parametrize(
    "content", ["", "my notes", "<!doctype html><p>a page of my own", PAGE.replace("script-src", "style-src")]
)
def test_any_other_file_is_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.html"
    path.write_text(content)
    with pytest.raises(
        ValueError, match=r"notes.html: exists already and is not a page by dmlstudy; name another output$"
    ):
        html.write_page(path, PAGE)
    assert path.read_text() == content


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder; make it or name another output$"):
        html.write_page(tmp_path / "nowhere" / "page.html", PAGE)
    with pytest.raises(ValueError, match=r"is a folder; name a file$"):
        html.write_page(tmp_path, PAGE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: is no file; name another output$"):
        html.write_page(tmp_path / "pipe", PAGE)
    if os.geteuid() == 0:  # to whom every folder is open
        with pytest.raises(OSError, match=r"No such file or directory: '/proc/page.html'$"):
            html.write_page("/proc/page.html", PAGE)
    else:
        tmp_path.chmod(0o500)
        with pytest.raises(
            ValueError, match="cannot be written; change its permissions or name another output"
        ):
            html.write_page(tmp_path / "page.html", PAGE)


def test_a_page_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    html.write_page(path, PAGE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/page.html'"):
        html.write_page(path, html.page("new", ""))
    assert path.read_text() == PAGE
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
