"""What the site adds to the pages: README, CONTRIBUTING and CHANGELOG, which lie above docs/."""

from __future__ import annotations

import html as markup
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
NOTEBOOK = "tutorial.ipynb"
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)


def on_files(files, config):
    from mkdocs.structure.files import File

    for name, source in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_inside_docs(text)))
    return files


def _inside_docs(text: str) -> str:
    """Links of a page above docs/ as those of a page in it."""
    for name, source in COPIES.items():
        text = text.replace(f"]({source})", f"]({name})")
    return re.sub(r"\]\(docs/", "](", PICTURE.sub(_by_scheme, text))


def _by_scheme(picture: re.Match[str]) -> str:
    """Two pictures of which the theme shows one: `<picture>` would not follow its switch."""
    dark, alt, light = picture.groups()
    return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"


def on_page_markdown(markdown, page, **_):
    """Links to copies lead to them. Links to files that the site does not have become text.

    A number and its bound stay on one line.
    """
    if page.file.src_uri == "tutorial.md":
        link = f'<a href="{NOTEBOOK}" download>This page as a notebook</a>'
        markdown = markdown.replace("\n\n", f"\n\n{link}\n\n", 1)
    for name, source in COPIES.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{source}", rf"](\1{name}", markdown)
    outside = r"(?:(?:\.\./)+(?:src|tests|benchmarks)/[^)]*|CITATION\.cff)"
    markdown = re.sub(rf"\[([^\]]+)\]\({outside}\)", r"\1", markdown)
    return re.sub(r"(\d) ± (\d)", "\\1\u00a0±\u00a0\\2", markdown)


def on_page_content(html, page, **_):
    """Tables, figures and code that scroll can be reached by the keyboard.

    A phone shows as a list: the results, whose answers are sentences, and tables of settings.
    """
    answers = page.file.src_uri == "results.md"
    html = re.sub(r"<table>.*?</table>", lambda table: _table(table, answers), html, flags=re.S)
    html = re.sub(r"<td( style=[^>]*)?>(.*?)</td>", _cell, html)
    begin = '<div class="scrolled figure" role="region" aria-label="figure" tabindex="0">'
    html = re.sub(r"<p>(?:<img [^>]*>\s*)+</p>", rf"{begin}\g<0></div>", html)
    return html.replace("<pre><span></span><code>", '<pre tabindex="0"><span></span><code>')


def _table(table: re.Match[str], answers: bool) -> str:
    settings = "<th>default</th>\n<th>meaning</th>\n</tr>" in table[0]
    kind = " answers" if answers else " answers settings" if settings else ""
    begin = f'<div class="scrolled{kind}" role="region" aria-label="table" tabindex="0">'
    return f"{begin}{table[0]}</div>"


def _cell(cell: re.Match[str]) -> str:
    """Numbers stay on one line. A sentence is not as narrow as its longest word."""
    text = markup.unescape(re.sub(r"<[^>]+>", "", cell[2]))
    words = re.search(r"[^\W\d_]{2}", text)
    kind = "sentence" if words and len(text) > 30 else "" if words else "numbers"
    return f'<td class="{kind}"{cell[1] or ""}>{cell[2]}</td>' if kind else cell[0]


def on_post_page(output, **_):
    """The theme's search has no name for screen readers."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def on_post_build(config):
    import jupytext

    jupytext.write(tutorial_notebook(), Path(config["site_dir"]) / "tutorial" / NOTEBOOK)


def tutorial_notebook():
    """The tutorial as a notebook, which stands alone: without its picture, links as their text."""
    import jupytext

    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n", "", text, flags=re.MULTILINE)
    notebook = jupytext.reads(re.sub(r"\[([^\]]+)\]\(\w+\.md[^)]*\)", r"\1", text), fmt="md")
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return notebook
