"""What MkDocs needs beyond its own: generated parts, files of the repository as pages, pictures in two colours.

- `<!-- generated: NAME -->` in a page becomes what the function NAME of generated.py returns. The line in italics below
  it is for those who read the page in the repository, where nothing is generated: it says where the same is found.
- `<!-- file: PATH -->` becomes a code block with that file of the repository.
- A link to a file outside docs/ (`../LOG.md`, `../deploy`) leads to a page that shows this file or folder, so that the
  same link works in the repository and on the site. A picture outside docs/ is copied to the site.
- An SVG picture is put into the page itself, its colours as variables, so that it follows the light and dark scheme.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

import generated
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SHOWN = "repository"  # the folder of the site for files of the repository that are not in docs/
HOME = "README.md"  # stands for the home page
LINK = re.compile(r"\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
MARK = re.compile(r"^<!-- (generated|file): (\S+) -->$(\n\*.+\*$)?", re.M)
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)"\s*/?>')
COLOUR = re.compile(r"#[0-9a-f]{6}\b")
PICTURES = (".png",)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".conf": "nginx", ".service": "ini"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file and folder of the repository that a page refers to."""
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        file = waiting.pop()
        text = _filled(file.content_string)
        for target, _ in LINK.findall(text):
            path = _path(file.src_uri, target)
            uri = _uri(path)
            if path.startswith("docs/") or files.get_file_from_path(uri) is not None:
                continue
            if not (ROOT / path).exists():
                continue  # left as it is, for MkDocs to complain about
            if path.endswith(PICTURES):
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
                continue
            added = File.generated(config, uri, content=_page_of(path))
            files.append(added)
            waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in the generated parts and turn links to the repository into links to its pages."""
    source = page.file.src_uri

    def relink(match: re.Match[str]) -> str:
        path = _path(source, match[1])
        if source.startswith(SHOWN) or not path.startswith("docs/"):
            return f"]({posixpath.relpath(_uri(path), posixpath.dirname(source) or '.')}{match[2] or ''})"
        return match[0]

    return LINK.sub(relink, _filled(markdown))


def _filled(markdown: str) -> str:
    """A page with its generated parts and files."""

    def fill(match: re.Match[str]) -> str:
        kind, name, _ = match.groups()
        if kind == "file":
            return _code_block(ROOT / name)
        return str(getattr(generated, name.replace("-", "_"))())

    return MARK.sub(fill, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Put SVG pictures into the page."""

    def inline(match: re.Match[str]) -> str:
        alt, source = match.groups()
        path = Path(config.docs_dir) / posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), source))
        text = path.read_text("utf-8")
        if "matplotlib" not in text:  # a plot keeps its colours and its white ground: they mean values
            text = COLOUR.sub(lambda colour: f"var(--figure-{colour[0][1:]}, {colour[0]})", text)
        return f'<span class="figure" role="img" aria-label="{html.escape(html.unescape(alt))}">{text.strip()}</span>'

    return PICTURE.sub(inline, content)


def _path(source: str, target: str) -> str:
    """The path in the repository that a link means; `source` is the page with the link, as the site knows it."""
    origin = source.removeprefix(f"{SHOWN}/") if source.startswith(f"{SHOWN}/") else f"docs/{source}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _uri(path: str) -> str:
    """Where a path of the repository is on the site."""
    if path == HOME:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SHOWN}/{path}" if path.endswith((".md", *PICTURES)) else f"{SHOWN}/{path.rstrip('/')}.md"


def _page_of(path: str) -> str:
    """The page of a file or folder: Markdown as it stands, anything else as code."""
    target = ROOT / path
    if path.endswith(".md"):
        return target.read_text("utf-8")
    shown = [target] if target.is_file() else sorted(item for item in target.iterdir() if item.is_file())
    parts = [f"# {path}"]
    for file in shown:
        if file != target:
            parts.append(f"## {file.name}")
        parts.append(_code_block(file))
    return "\n\n".join(parts)


def _code_block(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    return f"````{language}\n{path.read_text('utf-8').rstrip()}\n````"
