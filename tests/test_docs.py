"""The documentation: links and navigation hold, and its Python blocks run."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import os
import re
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import farspan
from farspan.data.documents import read_documents
from farspan.diagnosis.result import Diagnosis
from farspan.evals.results import EvalResult
from farspan.evals.suites import EvalConfig
from farspan.lab.finetune import FinetuneConfig
from farspan.lab.fleet_training import FleetPlan
from farspan.lab.networks import NetworkShape
from farspan.lab.study import LabStudy
from farspan.loading import LoadedModel
from farspan.methods.extend_config import ExtendConfig, read_extend_config
from farspan.methods.search_config import PASSKEYS, REPEATS, SearchConfig
from farspan.workflows.check import CheckResult
from farspan.workflows.export import ExportResult
from farspan.workflows.extend import ExtendResult
from farspan.workflows.inspect import Inspection

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
RESULTS = (LoadedModel, Inspection, Diagnosis, ExtendResult, EvalResult, ExportResult, CheckResult)
COPIES = {"index.md", "contributing.md", "changelog.md"}  # made by docs/site_hooks.py


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def links(text: str) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(text))
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path):
    for link in links(page.read_text()):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_navigation_has_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text()
    entries = re.findall(r"^ +- (?:.*: )?([\w/.-]+\.md)$", text, re.MULTILINE)
    assert sorted(entries) == sorted(
        {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | COPIES
    )
    top = re.findall(r"^  - (\w+):", text[text.index("\nnav:") :], re.MULTILINE)
    assert len(top) <= 6


def blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )


def test_the_file_layout_of_the_studies_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("corpora.md")
    names: dict = {}
    exec(block, names)
    texts = [document.text for document in read_documents("books_val.jsonl.xz")]
    assert texts == [document["text"] for document in names["documents"]]


def test_the_settings_of_networks_and_training_in_the_lab_are_those_of_the_code():
    """Every key of sizes.NAME and of train, with its default."""
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", (DOCS / "lab.md").read_text(), re.MULTILINE)
    NetworkShape().check("default")
    for config in (NetworkShape(), FleetPlan(steps=4000)):
        for key, value in asdict(config).items():
            assert (key, str(value).lower()) in rows


def test_the_numbers_of_studies_and_fine_tunings_in_the_lab_are_those_of_the_code():
    """Every number and switch, with its default."""
    tables = (DOCS / "lab.md").read_text().split("\n| key | default |")
    tables = [table.partition("\n\n")[0] for table in tables if "`even_lengths`" in table]
    configs = (LabStudy(("copy",)), FinetuneConfig("model", "copy"))
    for config, table in zip(configs, tables, strict=True):
        written = {}
        for keys, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE):
            written |= dict(zip(re.findall(r"\w+", keys), defaults.split(", "), strict=False))
        for key, value in asdict(config).items():
            if isinstance(value, int | float):
                assert json.loads(written[key]) == value, key


def test_the_defaults_of_extend_are_those_of_the_code():
    """Every key with its default, of the search those of a model without NoPE layers."""
    text = (DOCS / "extend.md").read_text().partition("\n## Settings")[2].partition("\n## ")[0]
    documented: dict[str, str] = {}
    for keys, values in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", text, re.MULTILINE):
        names = re.findall(r"`([\w.]+)`", keys)
        documented |= zip(names, values.split(", ") if len(names) > 1 else [values], strict=True)
    assert documented.pop("search.repeats") == f"{REPEATS} with NoPE layers, else 0"
    assert documented.pop("search.passkeys").startswith(f"{PASSKEYS} with NoPE layers, if ")
    assert documented.pop("tune") == "none"
    documented["search.spans"] = f"[{documented['search.spans']}]"
    documented["swan.tokens"] = documented["swan.tokens"].replace(",", "")
    plan = SearchConfig().resolve(has_nope=False)
    search = replace(
        SearchConfig(),
        batch=plan.batch,
        lr=plan.lr,
        warmup=plan.warmup,
        min_gain=plan.plateau.min_gain,
        answers=plan.answers,
    )
    settings = [f"{key}={value}" for key, value in documented.items()]
    assert read_extend_config(None, settings) == replace(ExtendConfig(), search=search)


def test_the_functions_of_the_python_page_have_the_arguments_of_the_code():
    """Those of its own in the first table, with their defaults; those it shares in the second."""
    text = (DOCS / "python.md").read_text().partition("\n## Functions")[2]
    text = text.partition("The other commands:")[0]
    shared = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    functions = re.findall(r"^\| `farspan\.(\w+)\(([^`]*)\)`", text, re.MULTILINE)
    assert len(shared) == 7
    assert len(functions) == 8
    for name, arguments in functions:
        written = [each for each in arguments.split(", ") if each not in ("*", "…", "**settings")]
        written += [option for option, of in shared if of.startswith("all") != (f"`{name}`" in of)]
        parameters = inspect.signature(getattr(farspan, name)).parameters
        assert {each.partition("=")[0] for each in written} == parameters.keys() - {"settings"}
        for argument, _, default in (each.partition("=") for each in written):
            if default:
                assert default.replace('"', "'") == repr(parameters[argument].default)
    (settings,) = re.findall(r"`settings` of `evaluate` are (.*?):", text, re.DOTALL)
    names = {field.name for field in fields(EvalConfig)} - {"preset"}
    assert set(re.findall(r"`(\w+)`", settings)) == names


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.__name__)
def test_the_results_of_the_python_page_have_the_fields_of_the_code(result):
    page = (DOCS / "python.md").read_text()
    (row,) = re.findall(rf"^\| `{result.__name__}` \| (.*) \|$", page, re.MULTILINE)
    names = {field.name for field in fields(result)} if is_dataclass(result) else result._fields
    assert set(names) <= set(re.findall(r"`(\w+)`", row))


def import_from_docs(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks():
    return import_from_docs("site_hooks")


def test_docstrings_become_markdown():
    pytest.importorskip("griffe", reason="it comes with the extra docs")
    result = doctest.testmod(import_from_docs("site_docstrings"))
    assert result.attempted
    assert not result.failed


def test_links_of_the_site_stay_in_it(hooks):
    """`make docs` refuses a link to a file above docs/."""
    for page in sorted(DOCS.rglob("*.md")):
        source = str(page.relative_to(DOCS))
        file = SimpleNamespace(file=SimpleNamespace(src_uri=source))
        for link in links(hooks.on_page_markdown(page.read_text(), file)):
            target = os.path.normpath(DOCS / source / ".." / link.partition("#")[0])
            path = Path(target).relative_to(DOCS)
            assert str(path) in hooks.COPIES or (DOCS / path).exists(), (source, link)


def test_the_home_page_has_a_picture_for_each_color_scheme_of_the_theme(hooks):
    page = hooks._inside_docs((DOCS.parent / "README.md").read_text())
    for scheme in ("light", "dark"):
        assert re.search(
            rf"^!\[Loss and .+\]\(figures/hero-{scheme}.svg#only-{scheme}\)$", page, re.M
        )
    assert "<picture>" not in page
    assert "docs/figures" not in page


def test_a_number_and_its_bound_stay_on_one_line_of_the_site(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results.md"))
    assert hooks.on_page_markdown("+0.1 ± 0.2 nats", page) == "+0.1\u00a0±\u00a00.2 nats"


def test_tables_and_code_of_the_site_are_reached_by_the_keyboard(hooks):
    html = "<table>\n<tr></tr></table><p></p><pre><span></span><code>x</code></pre><code>y</code>"
    pages = [
        SimpleNamespace(file=SimpleNamespace(src_uri=name)) for name in ("eval.md", "results.md")
    ]
    plain, results = (hooks.on_page_content(html, page) for page in pages)
    assert plain.startswith(
        '<div class="scrolled" role="region" aria-label="table" tabindex="0"><table>'
    )
    assert "</table></div><p>" in plain
    assert '<pre tabindex="0"><span></span><code>x' in plain
    assert plain.endswith("<code>y</code>")
    assert results.startswith('<div class="scrolled answers"')
    figure = hooks.on_page_content(
        '<p><img alt="a" src="a.png" />\n<img src="b.png" /></p>', pages[0]
    )
    assert figure.startswith('<div class="scrolled figure" role="region" aria-label="figure" tab')
    assert figure.endswith("</p></div>")


def test_a_phone_shows_settings_as_a_list_with_their_defaults(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="eval.md"))
    for third, kind in (("meaning", "scrolled answers settings"), ("time", "scrolled")):
        head = f"<th>key</th>\n<th>default</th>\n<th>{third}</th>\n</tr>"
        html = hooks.on_page_content(f"<table>\n<tr>\n{head}</table>", page)
        assert html.startswith(f'<div class="{kind}" role'), third
        assert html.endswith("</tr></table></div>")


def test_numbers_of_a_table_stay_on_one_line_and_sentences_get_room(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="eval.md"))
    for cell, kind in (
        ("51.5 (47–57)", "numbers"),
        ("<strong>4.3</strong> / &gt;10⁶", "numbers"),
        ("8K", "numbers"),
        ("no", None),
        ("tokens scored per window", None),
        ("perplexity: tokens scored per window", "sentence"),
        ("<code>yarn</code> for models with rotary", None),
    ):
        html = hooks.on_page_content(f'<td style="text-align: right;">{cell}</td>', page)
        shown = f' class="{kind}"' if kind else ""
        assert html == f'<td{shown} style="text-align: right;">{cell}</td>'


@pytest.fixture(scope="module")
def notebook(hooks):
    """The tutorial as the notebook of the site."""
    return hooks.tutorial_notebook()


def test_the_notebook_has_the_blocks_of_the_tutorial_and_no_link_to_a_page(notebook):
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert code == [block.rstrip("\n") for block in blocks("tutorial.md")]
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "It is an ordinary transformers model. Export writes" in text
    assert "](" not in text


@pytest.mark.long
def test_the_notebook_runs(notebook, tmp_path, monkeypatch):
    from nbclient import NotebookClient  # here, for only this test needs a kernel

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(each.text for each in outputs if each.get("name") == "stdout")
    before, after = re.search(r"^(\d+\.\d+) (\d+\.\d+)$", printed, re.MULTILINE).groups()
    assert float(after) < float(before)
    shown = [each.data for each in outputs if each.output_type == "execute_result"]
    assert any("image/png" in data for data in shown)  # diagnosis.plot()
    assert any("<caption>ExtendResult" in data.get("text/html", "") for data in shown)
    assert "nope-1k" in (tmp_path / "report.html").read_text()
