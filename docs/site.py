"""MkDocs hook: puts pages that lie outside of ``docs/`` on the site.

Their links, and those of other pages to them, stay as a browser of the repository wants them; on
the site ``docs/`` is the root, so both sides of a link lose it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ELSEWHERE = ("CHANGELOG.md", "benchmarks/RESULTS.md", "benchmarks/results/*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in (path for pattern in ELSEWHERE for path in sorted(ROOT.glob(pattern))):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    here = posixpath.dirname(uri if page.file.generated_by else f"docs/{uri}")

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[1])).removeprefix("docs/")
        return f"]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}"

    return re.sub(r"\]\((?![\w+]+:|#)([^)#\s]+)", on_site, markdown)
