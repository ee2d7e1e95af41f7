"""The pictures of pages in docs/faces: ``python -m tests.browser.screenshots`` after ``make repro``.

A face that another program serves is one more entry of ``SHOTS``, with its address instead of a file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from tests.browser.chromium import chromium, executable, visit

_COLOURS = 256
_MOST_BYTES = 300_000
#: How high a picture of the window may be, so that its edge cuts no line of text, no button and no chart.
_WHOLE_LINES = """() => {
    const boxes = [...document.querySelectorAll("svg, button")].map((one) => one.getBoundingClientRect());
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const range = document.createRange();
        range.selectNodeContents(texts.currentNode);
        boxes.push(...range.getClientRects());
    }
    let edge = innerHeight;
    for (let cut; (cut = boxes.find((one) => one.top < edge && edge < one.bottom)); ) edge = Math.floor(cut.top);
    return edge;
}"""


@dataclass(frozen=True)
class Shot:
    """One picture.

    Attributes:
        name: of the file, without its ending.
        page: relative to the data folder; or an address that begins with http.
        scheme: light or dark.
    """

    name: str
    page: str
    width: int = 1300
    scheme: str = "light"


SHOTS = (
    Shot("report", "report/report.html"),
    Shot("report-dark", "report/report.html", scheme="dark"),
    Shot("report-phone", "report/report.html", width=380),
    Shot("report-wide", "report/report.html", width=1920),
    Shot("report-index", "report/index.html"),
    Shot("prediction", "prediction/prediction.html"),
    Shot("policy", "policy/policy.html"),
)


def take(browser: Any, shot: Shot, data: Path, directory: Path) -> Path:
    """Take one picture of the first screen. Raises: ValueError if it is larger than 300 kB."""
    address = shot.page if shot.page.startswith("http") else data / shot.page
    with visit(browser, address, shot.width, shot.scheme) as one:
        clip = {"x": 0, "y": 0, "width": shot.width, "height": one.page.evaluate(_WHOLE_LINES)}
        return write(one.page, directory / f"{shot.name}.png", clip=clip)


def keep(page: Any, name: str) -> None:
    """Take a picture of a page that a test opened, if DPTUNE_SCREENSHOTS names a folder for it."""
    if folder := os.environ.get("DPTUNE_SCREENSHOTS"):
        page.wait_for_timeout(1500)
        write(page, Path(folder) / f"{name}.png")


def write(page: Any, path: Path, **options: Any) -> Path:
    """Write a picture of what a page shows now. Raises: ValueError if it is larger than 300 kB."""
    image = Image.open(BytesIO(page.screenshot(**options))).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: more than {_MOST_BYTES}")
    return path


def main(
    data: Annotated[Path, typer.Option(help="folder that holds report, prediction and policy")] = Path("data"),
    out: Annotated[Path, typer.Option(help="folder of the pictures")] = Path("docs/faces"),
    only: Annotated[str, typer.Option(help="names of pictures, with commas; empty: all whose page exists")] = "",
) -> None:
    """Take the pictures whose pages exist."""
    if executable() is None:
        raise SystemExit("error: no Chromium on the path. Fix: install chromium.")
    out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for shot in SHOTS:
            there = shot.page.startswith("http") or (data / shot.page).exists()
            if there and shot.name in (only.split(",") if only else (shot.name,)):
                print(take(browser, shot, data, out))


if __name__ == "__main__":
    typer.run(main)
