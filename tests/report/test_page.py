"""The shell: nothing in it can become markup, nothing in it is loaded, and it is written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import re

import plotly.graph_objects as go
from support.loaded_page import parsed

from dmlstudy.report import page
from dmlstudy.report.page import Html, Plot, Section

HOSTILE = """</script><script>alert("x")</script>'&"""


def whole(label: str = "a plot") -> str:
    figure = go.Figure(go.Scatter(x=[1], y=[2], name=page.in_plot(label)))
    plot = Plot(figure, label, label)
    table = page.table(label, [label, "n"], [[label, "1"]], "ln")
    return page.page(label, [page.paragraph(label)], [Section("one", label, [plot, table, label])])


def test_text_is_escaped_wherever_it_stands() -> None:
    found = parsed(whole(HOSTILE))
    assert len(found.scripts) == 2
    assert not any("alert" in tag for tag in found.tags)
    assert found.handlers == []
    assert not re.search(r"<script>alert", whole(HOSTILE))
    element = page.element("p", HOSTILE, title='"><img src=x onerror=alert(1)>')
    assert parsed(element).tags == ["p"]
    assert page.element("p", Html("<b>x</b>")) == "<p><b>x</b></p>"


def test_a_name_in_a_plot_is_text_not_markup() -> None:
    """Plotly draws tags as markup: <a href> would be a link."""
    assert page.in_plot("<a href='x'>&") == "&lt;a href='x'&gt;&amp;"
    script = parsed(whole("<b>bold</b>")).scripts[1]
    assert "<b>" not in script
    assert "\\u003c" not in script.replace(
        "\\u003c\\u002f", ""
    )  # no tag is left even where it is escaped as JSON


def test_nothing_is_loaded_and_the_policy_says_so() -> None:
    found = parsed(whole())
    assert found.loaded == []
    assert "@import" not in found.styles
    assert "url(" not in found.styles
    text = whole()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; img-src data:")
    assert "http" not in policy[1]
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in found.scripts]
    assert re.findall(r"'sha256-([^']+)'", policy[1]) == hashes


def test_a_page_without_plots_has_no_script() -> None:
    text = page.page("x", [], [Section("a", "A", ["words"])])
    assert parsed(text).scripts == []
    assert "script-src 'none'" in text
    assert "<nav" not in text


def test_what_readers_and_phones_need() -> None:
    text = whole()
    assert text.startswith("<!doctype html>")
    assert '<html lang="en">' in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert '<th scope="col">a plot</th>' in text
    assert '<th scope="row">a plot</th><td class="number">1</td>' in text
    assert "<caption><span>a plot</span></caption>" in text
    assert 'role="img" aria-label="a plot"' in text
    assert "@media print" in text
    assert "prefers-color-scheme:dark" in text


def test_commands_between_backticks_are_code() -> None:
    assert page.with_commands("run `a <b>` now") == "run <code>a &lt;b&gt;</code> now"
