"""The HTML report in a real browser: it opens offline, without a word on the console, and can be used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from browser import ARGUMENTS, find_browser
from comparison_models import SHAPE, images, ort_quantized, residual_net
from helpers import build, node, normal
from report_pages import made_up
from roundel.report.html import ReportContent, render

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

DESKTOP, PHONE = (1280, 900), (390, 844)
STEP = 160  # from one layer of the chart to the next, at its first zoom
SECONDS = 20_000  # of a busy machine, in ms; without reason to wait a page takes a fraction of one


@dataclass
class Opened:
    """A page, and everything it said or asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @property
    def chosen(self) -> str:
        """The layer whose details are shown."""
        return str(self.page.inner_text("#details h2"))

    def column(self, key: str) -> list[str]:
        """What the table shows in one column, top to bottom."""
        keys = self.page.eval_on_selector_all("#table th", "all => all.map((th) => th.dataset.column)")
        cells = f"#table tbody tr[data-layer] td:nth-child({keys.index(key) + 1})"
        return list(self.page.eval_on_selector_all(cells, "all => all.map((td) => td.textContent)"))

    def centre(self) -> tuple[float, float]:
        """The middle of the chart, where the selected layer stands at first."""
        self.page.locator("#chart").scroll_into_view_if_needed()
        box = self.page.locator("#chart").bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def picture(self) -> str:
        """The chart's pixels, once it has drawn itself."""
        self.page.evaluate("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")
        return str(self.page.evaluate("document.getElementById('chart').toDataURL()"))


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium on this machine; `python tests/browser.py` fetches one")
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Open]:
    """Opens files; when the test has ended, no page may have complained or asked the network for anything."""
    opened: list[Opened] = []

    def open_file(file: Path, size: tuple[int, int] = DESKTOP, scheme: str = "light", **more: Any) -> Opened:
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **more
        )
        context.set_offline(True)
        context.set_default_timeout(SECONDS)
        new = Opened(context.new_page())
        opened.append(new)
        new.page.on("console", lambda message: new.said.append(message.text))
        new.page.on("pageerror", lambda error: new.said.append(str(error)))
        new.page.on("request", lambda request: new.asked.append(request.url))
        new.page.goto(file.as_uri())
        new.page.wait_for_selector("html[data-ready]")
        return new

    yield open_file
    for each in opened:
        assert each.said == []
        assert [url for url in each.asked if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in each.asked if url.startswith("file:")]) == 1
        each.page.context.close()


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `roundel quantize --report` writes."""
    folder = tmp_path_factory.mktemp("run")
    onnx.save(residual_net(), folder / "net.onnx")
    np.savez(folder / "data.npz", x=np.concatenate([sample["x"] for sample in images(8)]))
    words = ["net.onnx", "-o", "net.xint8.onnx", "-p", "xint8", "--data", "data.npz", "--report", "r.html"]
    subprocess.run(
        [sys.executable, "-m", "roundel", "quantize", *words], cwd=folder, check=True, capture_output=True
    )
    return folder / "r.html"


@pytest.fixture(scope="module")
def chain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain chain, wider than the screen, so that the chosen layer stands in the middle of the chart."""
    file = tmp_path_factory.mktemp("chain") / "chain.html"
    file.write_text(render(ReportContent(made_up(60, branches=False))), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand layers."""
    file = tmp_path_factory.mktemp("long") / "long.html"
    file.write_text(render(ReportContent(made_up(1000))), encoding="utf-8")
    return file


def test_every_part_of_a_run_is_there(show: Open, run_page: Path) -> None:
    opened = show(run_page)
    text = opened.page.inner_text("body")
    for words in ("net.xint8.onnx", "preset\nxint8", "Output error", "File size", "On the NPU", "✓ kept"):
        assert words in text
    for part in (
        "summary",
        "worst",
        "outputs",
        "steps",
        "chart",
        "overview",
        "table",
        "npu",
        "times",
        "recipe",
    ):
        assert opened.page.locator(f"#{part}").is_visible(), part
    assert "island" in opened.page.inner_text("#npu")
    assert "calibrate" in opened.page.inner_text("#times")
    assert "equalization" in opened.page.inner_text("#steps")


def test_the_worst_layer_is_chosen_first_and_listed_first(show: Open, run_page: Path) -> None:
    opened = show(run_page)
    assert opened.chosen == opened.column("name")[0]
    assert opened.page.inner_text("#worst li .mono >> nth=0") == opened.chosen


def test_the_table_sorts_by_any_column_both_ways(show: Open, long_page: Path) -> None:
    opened = show(long_page)
    for key in ("introduced", "total", "order"):
        head = opened.page.locator(f"th[data-column={key}]")
        for direction in ("ascending", "descending"):
            if head.get_attribute("aria-sort") != direction:
                head.locator("button").click()
            assert head.get_attribute("aria-sort") == direction
            figures = [float(text) for text in opened.column(key)]
            assert figures == sorted(figures, reverse=direction == "descending")
            assert len(set(figures)) > 3
    opened.page.click("th[data-column=name] button")
    assert opened.column("name") == sorted(opened.column("name"))
    assert opened.page.locator("th[aria-sort]").count() == 1


def test_the_table_filters_by_words_and_by_operator(show: Open, run_page: Path) -> None:
    opened = show(run_page)
    whole = len(opened.column("name"))
    assert opened.page.inner_text("#count") == f"{whole} layers"
    opened.page.fill("#search", "CONV2")
    assert opened.column("name") == ["conv2"]
    assert opened.page.inner_text("#count") == f"1 of {whole} layers"
    opened.page.fill("#search", "no such thing")
    assert opened.column("name") == []
    assert opened.page.locator("text=No layer fits.").is_visible()
    opened.page.fill("#search", "")
    opened.page.select_option("#op", "Conv")
    assert set(opened.column("op")) == {"Conv"}
    assert 0 < len(opened.column("op")) < whole


def test_hovering_tells_and_clicking_chooses(show: Open, chain_page: Path) -> None:
    opened = show(chain_page)
    first = opened.chosen
    x, y = opened.centre()
    opened.page.mouse.move(x, y)
    opened.page.wait_for_selector("#tip:not([hidden])")
    assert first in opened.page.inner_text("#tip")
    assert "introduced here" in opened.page.inner_text("#tip")
    opened.page.mouse.move(x + STEP, y)
    following = opened.page.inner_text("#tip b")
    assert following != first
    opened.page.mouse.click(x + STEP, y)
    assert opened.chosen == following
    marked = opened.page.locator("#table tr[aria-selected=true] .name").all_inner_texts()
    assert marked == [opened.chosen]
    opened.page.mouse.move(x, y - 400)
    assert opened.page.locator("#tip").is_hidden()


def test_a_click_in_the_table_shows_histogram_and_weights(show: Open, run_page: Path) -> None:
    opened = show(run_page)
    opened.page.click("#table tr:has-text('conv1')")
    assert opened.chosen == "conv1"
    plots = opened.page.eval_on_selector_all(
        "#details svg.plot", "all => all.map((svg) => svg.getAttribute('aria-label'))"
    )
    assert "stored range" in plots[0]
    assert any("before equalization" in label for label in plots)
    assert any("as stored" in label for label in plots)
    bars = "document.querySelector('#details .plot .bars').getAttribute('d')"
    before = opened.page.evaluate(bars)
    opened.page.uncheck("#log")
    assert opened.page.evaluate(bars) != before


def test_the_chart_zooms_pans_and_changes_its_colours(show: Open, chain_page: Path) -> None:
    opened = show(chain_page)
    x, y = opened.centre()
    seen = [opened.picture()]

    def changed() -> bool:
        seen.append(opened.picture())
        return seen[-1] not in seen[:-1]

    opened.page.click("button:has-text('+')")
    assert changed()
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 90, y, steps=4)
    opened.page.mouse.up()
    assert changed()
    opened.page.keyboard.down("Control")
    opened.page.mouse.wheel(0, 300)
    opened.page.keyboard.up("Control")
    assert changed()
    opened.page.click("text=Show all")
    assert changed()
    opened.page.select_option("#metric", "total")
    assert changed()


def test_everything_works_from_the_keyboard(show: Open, run_page: Path) -> None:
    opened = show(run_page)
    order = sorted(zip(map(int, opened.column("order")), opened.column("name"), strict=True))
    names = [name for _, name in order]
    opened.page.focus("#chart")
    opened.page.keyboard.press("Home")
    assert opened.chosen == names[0]
    opened.page.keyboard.press("ArrowRight")
    assert opened.chosen == names[1]
    assert names[1] in opened.page.inner_text("#live")
    opened.page.focus("th[data-column=order] button")
    opened.page.keyboard.press("Enter")
    opened.page.focus("#table tr[tabindex='0']")
    opened.page.keyboard.press("ArrowDown")
    assert opened.chosen == names[2]
    opened.page.keyboard.press("End")
    assert opened.chosen == names[-1]
    assert opened.page.locator("#table tr[tabindex='0']").count() == 1


def test_a_recipe_is_copied_and_gives_the_same_recipe(show: Open, run_page: Path) -> None:
    opened = show(run_page, permissions=["clipboard-read", "clipboard-write"])
    opened.page.click("#recipe .code >> nth=1 >> button")
    opened.page.wait_for_selector("#recipe button:has-text('Copied')")
    text = opened.page.inner_text("#recipe pre >> nth=1")
    file = run_page.with_name("recipe.yaml")
    file.write_text(text, encoding="utf-8")
    assert roundel.load_recipe(file).name == "xint8"
    assert "roundel quantize net.onnx" in opened.page.inner_text("#recipe pre >> nth=0")
    assert "--data data.npz" in opened.page.inner_text("#recipe pre >> nth=0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(
    show: Open, run_page: Path, long_page: Path, scheme: str
) -> None:
    for file in (run_page, long_page):
        opened = show(file, PHONE, scheme, has_touch=True, is_mobile=True)
        assert opened.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        assert opened.page.evaluate("window.innerWidth") == PHONE[0]
        # Nothing sticks out of a frame that does not scroll by itself, either.
        wide = opened.page.evaluate(
            "[...document.querySelectorAll('.card, .figure, #table')]"
            ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.id || e.className)"
        )
        assert wide == []
        opened.page.locator("#table tr[data-layer] >> nth=1").tap()
        assert opened.chosen.endswith(opened.column("name")[1].lstrip("…"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_of_the_chart_differ_in_lightness(show: Open, run_page: Path, scheme: str) -> None:
    """So that they can be told apart with any colour vision; the worst is the furthest from the page's."""
    opened = show(run_page, scheme=scheme)
    pixels = opened.page.evaluate(
        "(() => { const c = document.querySelector('.legend canvas');"
        " return [...c.getContext('2d').getImageData(0, 5, c.width, 1).data]; })()"
    )
    rgb = np.asarray(pixels, float).reshape(-1, 4)[:, :3] / 255
    light = rgb**2.2 @ (0.2126, 0.7152, 0.0722)
    steps = np.diff(light) * (1 if scheme == "light" else -1)
    assert (steps > -1e-3).all()
    assert abs(light[0] - light[-1]) > 0.6


def test_the_page_follows_the_colour_scheme(show: Open, run_page: Path) -> None:
    opened = show(run_page)
    page = opened.page
    shade = "getComputedStyle(document.body).backgroundColor"
    light, drawn = page.evaluate(shade), opened.picture()
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(shade) != light
    assert opened.picture() != drawn


def test_a_thousand_layers_cost_no_more_than_those_in_sight(show: Open, long_page: Path) -> None:
    opened = show(long_page)
    page = opened.page
    assert page.inner_text("#count") == "1,000 layers"
    assert page.locator("#table tr[data-layer]").count() < 100
    page.click("th[data-column=order] button")
    page.evaluate("document.querySelector('.rows').scrollTop = 1e6")
    page.wait_for_selector("#table tr[data-layer='999']")
    assert page.locator("#table tr[data-layer]").count() < 100
    page.fill("#search", "conv_77")
    assert page.inner_text("#count") == "11 of 1,000 layers"
    page.click("#table tr:has-text('conv_777')")
    assert opened.chosen == "/blocks.777/conv_777"
    page.click("text=Show all")
    opened.picture()


EVIL = "</script><img src=x onerror=window.hacked=1><b>{0}"


def test_names_stay_text(show: Open, tmp_path: Path) -> None:
    """A model that a stranger has sent: node, tensor and weight names that would be markup."""
    first, second = (EVIL.format(i) for i in "ab")
    model = build(
        [
            node("Conv", ["x", f"{first}w"], [f"{first}t"], first, pads=[1, 1, 1, 1]),
            node("Relu", [f"{first}t"], [f"{first}r"], f"{first}relu"),
            node("Conv", [f"{first}r", f"{second}w"], [f"{second}y"], second, pads=[1, 1, 1, 1]),
        ],
        {"x": SHAPE},
        {f"{second}y": [1, 4, 12, 12]},
        {f"{first}w": normal(8, 3, 3, 3, seed=1), f"{second}w": normal(4, 8, 3, 3, seed=2)},
    )
    result = roundel.quantize(model, recipe="a8w8", data=images())
    file = tmp_path / "r.html"
    comparison = roundel.write_report(file, model, result, images())
    opened = show(file)
    _nothing_happened(opened)
    assert first in opened.page.inner_text("#layers")
    renamed = replace(
        comparison, float_model=EVIL, quantized_model=EVIL, notes=(EVIL,), unmatched={EVIL: EVIL}
    )
    file.write_text(render(ReportContent(renamed, unchecked=EVIL)), encoding="utf-8")
    opened = show(file)
    _nothing_happened(opened)
    assert EVIL in opened.page.title()
    assert EVIL in opened.page.inner_text("#notes")


def _nothing_happened(opened: Opened) -> None:
    page = opened.page
    for index in range(page.locator("#table tr[data-layer]").count()):
        page.locator("#table tr[data-layer]").nth(index).click()
    page.mouse.move(*opened.centre())
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, main b:text-is('a')").count() == 0


def test_the_policy_stops_a_script_that_got_in(show: Open, tmp_path: Path) -> None:
    """The second line of defence, proved by putting a script into the file."""
    page = render(ReportContent(made_up(3))).replace("</main>", "<script>window.hacked = 1</script></main>")
    file = tmp_path / "r.html"
    file.write_text(page, encoding="utf-8")
    opened = show(file)
    assert opened.page.evaluate("window.hacked") is None
    assert len(opened.said) == 1
    assert "Content Security Policy" in opened.said.pop()


def test_a_model_of_another_tool(show: Open, tmp_path: Path) -> None:
    onnx.save(ort_quantized(residual_net(), tmp_path, images()), tmp_path / "theirs.onnx")
    onnx.save(residual_net(), tmp_path / "ours.onnx")
    np.save(tmp_path / "x.npy", np.concatenate([sample["x"] for sample in images()]))
    words = ["ours.onnx", "theirs.onnx", "--data", "x.npy", "--report", "r.html", "--device", "krk"]
    done = subprocess.run(
        [sys.executable, "-m", "roundel", "compare", *words],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "report: r.html" in done.stdout
    opened = show(tmp_path / "r.html")
    assert "Not known" in opened.page.inner_text("#recipe")
    assert opened.page.locator("#steps").count() == 0
    assert "krk" in opened.page.inner_text("#npu h2")
    opened.page.click("#table tr:has-text('conv2')")
    assert "not equalized" in opened.page.inner_text("#details")
