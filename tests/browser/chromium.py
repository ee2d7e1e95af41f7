"""A Chromium that asks nothing of the network, and what a page did in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP *.example 127.0.0.1",  # names that their owner made to mean this machine
)
#: Widths of a telephone, a tablet, a laptop and a large screen, in pixels, with heights.
SCREENS = {380: 800, 768: 1024, 1300: 900, 1920: 1080}
#: Milliseconds: a page draws in one second, but its machine may be busy.
_PATIENCE, _POLL = 60_000, 50


def executable() -> str | None:
    """The path of a Chromium; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that was opened.

    Attributes:
        page: Playwright's.
        said: messages of its console, and errors that it did not catch.
        asked: addresses that it asked for, its own left out.
    """

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def unfold(self) -> None:
        """Open everything that is folded, and wait until its charts are drawn."""
        self.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        self.wait_for_charts()

    def wait_for_charts(self) -> None:
        """Wait until every chart that is not folded is drawn."""
        open_plots = "[...document.querySelectorAll('.plot')].filter((one) => !one.closest('details:not([open])'))"
        self.wait_until(f"{open_plots}.every((one) => one.querySelector('svg'))")

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own wait evaluates it where the page forbids it.

        Raises: AssertionError if it never is.
        """
        for _ in range(_PATIENCE // _POLL):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(_POLL)
        raise AssertionError(f"never became true: {condition}")

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@contextmanager
def visit(browser: Any, address: str | Path, width: int = 1300, scheme: str = "light") -> Iterator[Visit]:
    """Open a file or an address, and wait until its charts are drawn.

    Args:
        scheme: light or dark.
    """
    url = address.resolve().as_uri() if isinstance(address, Path) else address
    page = browser.new_page(viewport={"width": width, "height": SCREENS.get(width, 900)}, color_scheme=scheme)
    one = Visit(page)
    page.on("console", lambda message: one.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: one.said.append(f"error: {error}"))
    page.on("request", lambda request: one.asked.append(request.url) if request.url != url else None)
    try:
        page.goto(url, timeout=_PATIENCE)
        one.wait_for_charts()
        yield one
    finally:
        page.close()
