"""Screenshots of a report for docs/report.md: `python scripts/make_report_images.py REPORT.html`."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import ARGUMENTS, find_browser  # noqa: E402


@dataclass(frozen=True)
class Shot:
    """One picture.

    Attributes:
        name: of the file.
        size: of the window.
        scheme: light or dark.
        part: the element at the top of the window, None for the page's own top.
        hover: whether the pointer rests on the selected layer.
        whole: show the whole network.
    """

    name: str
    size: tuple[int, int]
    scheme: str = "light"
    part: str | None = None
    hover: bool = False
    whole: bool = False


SHOTS = (
    Shot("report-desktop", (1360, 1010)),
    Shot("report-layers", (1360, 1120), part="#layers", whole=True),
    Shot("report-dark", (1360, 900), "dark", "#layers", hover=True),
    Shot("report-phone", (390, 844)),
    Shot("report-phone-layers", (390, 844), "dark", "#chart-card"),
)


def take(page: Page, shot: Shot) -> bytes:
    """The window's pixels."""
    if shot.part:
        page.evaluate("(part) => document.querySelector(part).scrollIntoView()", shot.part)
    if shot.whole:
        page.click("text=Show all")
    if shot.hover:
        box = page.locator("#chart").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(300)
    return page.screenshot()


def main() -> None:
    """Write all of them into docs/images."""
    report = Path(sys.argv[1]).resolve()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser(), args=ARGUMENTS)
        for shot in SHOTS:
            width, height = shot.size
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=shot.scheme,  # type: ignore[arg-type]
            )
            page.goto(report.as_uri())
            page.wait_for_selector("html[data-ready]")
            picture = Image.open(io.BytesIO(take(page, shot))).convert("RGB")
            target = ROOT / "docs" / "images" / f"{shot.name}.png"
            picture.save(target, optimize=True)
            sys.stdout.write(f"{target.name}: {target.stat().st_size / 1000:.0f} KB\n")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
