"""The documentation as a reader's browser shows it: every page, without the network."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.test_docs import DOCS, build

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="runs where Debian's chromium is installed"
)
PAGES = sorted(page.stem for page in DOCS.glob("*.md"))
_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what is elsewhere fails aloud
    *("--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=4000", "--dump-dom"),
)
_SECONDS = 60
_MIN_WORDS = 100


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the built documentation is served, and a page with a fault."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    (folder / "faulty.html").write_text("<h1>Faulty</h1><script>nothing.there()</script>")
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def open_page(url: str, profile: Path) -> tuple[str, list[str]]:
    """What the browser made of a page, and the complaints on its console."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *_ARGUMENTS, f"--user-data-dir={profile}", url],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_shown_whole(site: str, name: str, tmp_path: Path) -> None:
    html, complaints = open_page(f"{site}/{'' if name == 'index' else name + '/'}", tmp_path)
    assert complaints == []
    article = re.search(r"<article.*?</article>", html, re.DOTALL)
    assert article is not None
    text = re.sub(r"<[^>]+>", " ", article[0])
    assert len(text.split()) > _MIN_WORDS
    assert html.count("<h1") == 1, "a page has one title"
    assert not re.search(r'(src|href)="https?://[^"]+\.(js|css|png|svg|woff2?)"', html)


def test_a_complaint_would_be_noticed(site: str, tmp_path: Path) -> None:
    _, complaints = open_page(f"{site}/faulty.html", tmp_path)
    assert len(complaints) == 1
