"""The report in Chromium: charts are drawn on any screen, without an error or a request.

`npm install axe-core` in the checkout, or FARSPAN_AXE=path/to/axe.min.js, checks the
accessibility of the report and of the site.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from browser import SCHEMES, WIDTHS, Browser, chromium
from farspan.workflows.report import report

CHECKOUT = Path(__file__).parent.parent
AXE = Path(os.environ.get("FARSPAN_AXE", CHECKOUT / "node_modules/axe-core/axe.min.js"))
TURNED = 560  # a phone on its side, where the legend of the fixture needs a line less
GRAVE = ("serious", "critical")
pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine")

# Of every chart, whether it has lines or cells; the widest element; charts whose legend reaches
# into the lines; what colors the page has.
FACTS = """({
  drawn: [...document.querySelectorAll(".chart")].map(
    chart => chart.querySelectorAll(".scatterlayer .js-line, .heatmaplayer image").length),
  width: document.documentElement.scrollWidth,
  covered: [...document.querySelectorAll(".chart")].filter(chart => {
    const legend = chart.querySelector(".legend")
    const bottom = legend && legend.getBoundingClientRect().bottom
    return legend && bottom > chart.getBoundingClientRect().top + chart._fullLayout._size.t + 1
  }).length,
  cards: [...document.querySelectorAll(".card h3")].map(heading => heading.textContent),
  marks: [...document.querySelectorAll(".annotation-text")].map(label => label.textContent),
  colors: [getComputedStyle(document.body).backgroundColor,
           document.querySelector(".js-line").style.stroke]
})"""


# What stands over the samples, and whether a button offers more of them.
LIST = """[
  document.querySelector(".samples summary").textContent,
  document.querySelector(".samples .count").textContent,
  document.querySelector(".samples .more").checkVisibility()
]"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A diagnosis with curves and heads, and an evaluation with samples."""
    folder = tmp_path_factory.mktemp("runs")
    positions = list(range(1, 257))
    curve = [2 + position / 100 for position in positions]
    model = {"model": "a model with a very long name that has no space" * 2, "train_length": 128}
    model |= {"positions": positions, "loss": curve, "entropy": curve, "verdict": "It fails."}
    model |= {"loss_knee": 200, "entropy_knee": None, "entropy_by_head": {"0": [curve] * 40}}
    score = {"eval": "perplexity", "metric": "ppl", "low": 9.0, "high": 2e3, "n": 8}
    score["tags"] = {"task": "text"}
    scores = [{**score, "length": length, "value": float(length)} for length in (128, 256)]
    baseline = {"model": "a name that needs a line of the legend on a phone", "scores": scores}
    sample = {"model": "m", "eval": "ruler", "task": "niah", "length": 256, "score": 1.0}
    sample |= {"prediction": "7", "answers": ["7"]}
    records = {
        "diagnosis": {"command": "diagnose", "models": [model]},
        "scores": {"command": "eval", "model": "m", "scores": scores, "vs": baseline},
    }
    records["scores"]["notes"] = ["a_path_without_a_space/" * 9]
    for name, record in records.items():
        (folder / name / "samples").mkdir(parents=True)
        (folder / name / "record.json").write_text(json.dumps(record))
    (folder / "scores" / "samples" / "niah.jsonl").write_text(json.dumps(sample) + "\n")
    return report([folder / name for name in records], folder / "report.html")


def open_samples(browser: Browser) -> None:
    """Their text is unpacked when their part of the page is first opened."""
    browser.evaluate("document.querySelector('details').open = true")
    samples = "document.querySelectorAll('.sample').length"
    browser.evaluate(f"new Promise(done => setInterval(() => {samples} && done(), 20))")


@pytest.mark.long
def test_charts_are_drawn_at_every_width_and_color_scheme(page):
    colors = {}
    with Browser(chromium()) as browser:
        browser.open(page)
        for width, scheme in itertools.product((WIDTHS[0], TURNED, *WIDTHS[1:]), SCHEMES):
            browser.show(width, scheme)
            facts = browser.evaluate(FACTS)
            assert facts["drawn"] == [1, 1, 1, 2]
            assert facts["width"] == width, "only tables scroll sideways"
            assert facts["covered"] == 0, "also when a legend takes another number of lines"
            assert facts["marks"] == ["trained on 128"] * 2
            assert len(facts["cards"]) == 3
            colors.setdefault(scheme, set()).add(tuple(facts["colors"]))
        open_samples(browser)
        assert browser.evaluate(LIST) == ["m: 1 sample", "1 sample, 1 right", False]
        assert browser.errors == []
        assert browser.requests == [page.as_uri()]
    (light,), (dark,) = colors["light"], colors["dark"]
    assert light[0] != dark[0], "the page"
    assert light[1] != dark[1], "the lines of charts"


needs_axe = pytest.mark.skipif(
    not AXE.is_file(), reason=f"there is no {AXE}; run `npm install axe-core`"
)


def grave_violations(browser: Browser) -> list[str]:
    """Those of the open page, by rule and element."""
    browser.evaluate(AXE.read_text())
    answer = json.loads(browser.evaluate("axe.run().then(JSON.stringify)"))
    assert answer["passes"], "rules were tested"
    grave = [rule for rule in answer["violations"] if rule["impact"] in GRAVE]
    return [f"{rule['id']}: {node['html']}" for rule in grave for node in rule["nodes"]]


@needs_axe
@pytest.mark.long
def test_the_report_is_accessible_at_every_width_and_color_scheme(page):
    with Browser(chromium()) as browser:
        browser.open(page)
        open_samples(browser)
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            browser.show(width, scheme)
            assert grave_violations(browser) == [], f"{width} {scheme}"


@needs_axe
@pytest.mark.long
def test_the_site_is_accessible_at_every_width_and_color_scheme(tmp_path):
    """A page with a picture, one of signatures, one of long tables."""
    pytest.importorskip("mkdocs", reason="it comes with the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=CHECKOUT, env=environment, check=True)
    schemes = set()
    with Browser(chromium()) as browser:
        for name, width, scheme in itertools.product(("", "api/", "log/"), WIDTHS, SCHEMES):
            browser.open_site(tmp_path / name / "index.html", width, scheme)
            schemes.add((scheme, browser.evaluate("document.body.dataset.mdColorScheme")))
            assert grave_violations(browser) == [], f"{name} {width} {scheme}"
    assert schemes == {("light", "default"), ("dark", "slate")}
