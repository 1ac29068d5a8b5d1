"""What the site adds to the pages: README, CONTRIBUTING and CHANGELOG, which lie above docs/."""

from __future__ import annotations

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
    """Tables and code that scroll can be reached by the keyboard.

    Those of the results have answers of some lines, which a phone shows as a list.
    """
    kind = "scrolled answers" if page.file.src_uri == "results.md" else "scrolled"
    begin = f'<div class="{kind}" role="region" aria-label="table" tabindex="0">'
    html = re.sub(r"<table>.*?</table>", rf"{begin}\g<0></div>", html, flags=re.DOTALL)
    return html.replace("<pre><span></span><code>", '<pre tabindex="0"><span></span><code>')


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
