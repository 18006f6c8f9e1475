"""The report in a real browser: without errors, without a network, by mouse and by keyboard, on paper."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.planted_results import write_planted
from benchmarks.results_tree import write_results
from hpcbench.cli.main import cli
from hpcbench.report.plots.plotting import PLOTS
from tests.browser import Browser, By, Keys, Select, WebDriverWait, WebElement, browsers
from tests.report import planted
from tests.report.planted import launches
from tests.report.test_report_page import EVIL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from browsers(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of planted trees."""
    folder = tmp_path_factory.mktemp("pages")
    elsewhere = planted.failure()
    for one in elsewhere:
        one.cluster = "d"
    planted.write([*planted.crossover(), *elsewhere], folder / "planted")
    hostile = [*launches(0.1, 2, model=EVIL), *launches(0.1, 2, nodes=2, model=EVIL, strategy="fsdp", warnings=[EVIL])]
    planted.write(hostile, folder / "hostile")
    write_results(folder / "large" / "made-up", 1100)
    write_planted(folder / "every" / "made-up")
    for name in ("planted", "hostile", "large", "every"):
        done = CliRunner().invoke(cli, ["report", f"{folder / name}/", "--out", str(folder / f"{name}.html")])
        assert done.exception is None
    return folder


def cells(browser: Browser, table: str, heading: str) -> list[str]:
    """The texts of a column, of the rows that are shown."""
    script = """
        const table = document.getElementById(arguments[0]);
        const place = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.trim() === arguments[1]);
        return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[place].textContent);
    """
    found: list[str] = browser.run(script, table, heading)
    return found


def head(browser: Browser, table: str, heading: str) -> WebElement:
    heads = browser.driver.find_elements(By.CSS_SELECTOR, f"#{table} th")
    (found,) = [one for one in heads if one.text.strip() == heading]
    return found


@contextmanager
def resized(browser: Browser, width: int, height: int = 900) -> Iterator[None]:
    browser.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    try:
        yield
    finally:
        browser.tell("Emulation.clearDeviceMetricsOverride")


def test_the_page_opens_without_errors_and_without_a_network(browser: Browser, folder: Path) -> None:
    page = folder / "planted.html"
    browser.open(page)
    assert browser.driver.title == "planted - hpcbench report"
    assert browser.complaints() == []
    assert browser.requests() == {page.as_uri(): ""}


def test_the_content_policy_blocks_injected_code_and_requests(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """Injected code neither runs nor calls out, and the tests above would see a call."""
    open_page = tmp_path / "open.html"
    open_page.write_text('<!DOCTYPE html><title>open</title><img src="http://away.invalid/open.png" alt="">')
    browser.open(open_page)
    assert browser.requests() == {open_page.as_uri(): "", "http://away.invalid/open.png": ""}
    text = (folder / "planted.html").read_text()
    inserted = (
        '<script>window.hacked = 1</script><img src="http://away.invalid/x.png" onerror="window.hacked = 2" alt="">'
    )
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("<footer>", f"{inserted}<footer>", 1))
    browser.open(broken)
    assert browser.run("return window.hacked") is None
    assert browser.run("return document.querySelectorAll('th button').length") > 0
    assert len([one for one in browser.complaints() if "Content Security Policy" in one]) >= 2
    assert browser.requests() == {broken.as_uri(): "", "http://away.invalid/x.png": "csp"}


def test_tables_sort_by_click_and_by_keyboard(browser: Browser, folder: Path) -> None:
    browser.open(folder / "planted.html")
    button = head(browser, "results", "samples/s").find_element(By.TAG_NAME, "button")
    button.click()
    known = ["80.0", "80.0", "136", "152", "213", "229", "267", "356", "525"]
    shown = [text for text in cells(browser, "results", "samples/s") if text]
    assert (shown, cells(browser, "results", "samples/s")[-1]) == (known, "")
    assert head(browser, "results", "samples/s").get_attribute("aria-sort") == "ascending"
    button.click()
    assert [text for text in cells(browser, "results", "samples/s") if text] == known[::-1]
    assert cells(browser, "results", "samples/s")[-1] == ""
    assert head(browser, "results", "samples/s").get_attribute("aria-sort") == "descending"
    other = head(browser, "results", "strategy").find_element(By.TAG_NAME, "button")
    browser.run("arguments[0].focus()", other)
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert cells(browser, "results", "strategy") == sorted(cells(browser, "results", "strategy"))
    assert head(browser, "results", "samples/s").get_attribute("aria-sort") is None
    browser.driver.switch_to.active_element.send_keys(Keys.SPACE)
    assert head(browser, "results", "strategy").get_attribute("aria-sort") == "descending"


def test_typed_words_filter_the_rows_of_a_table(browser: Browser, folder: Path) -> None:
    browser.open(folder / "planted.html")
    holder = browser.driver.find_element(By.XPATH, "//table[@id='results']/ancestor::div[@data-grid]")
    status = holder.find_element(By.CSS_SELECTOR, "[role=status]")
    rows = len(cells(browser, "results", "strategy"))
    assert status.text == f"{rows} rows"
    field = holder.find_element(By.CSS_SELECTOR, "input[type=search]")
    field.send_keys("FSDP ms")
    assert set(cells(browser, "results", "strategy")) == {"fsdp"}
    assert status.text == f"4 of {rows} rows fit"
    label = holder.find_element(By.XPATH, ".//label[contains(., 'nodes')]")
    Select(label.find_element(By.TAG_NAME, "select")).select_by_value("8")
    assert cells(browser, "results", "samples/s") == ["525"]
    field.clear()
    field.send_keys("no such word")
    assert cells(browser, "results", "strategy") == []
    assert status.text == f"0 of {rows} rows fit"


def test_plots_are_shown_and_can_be_explored(browser: Browser, folder: Path) -> None:
    browser.open(folder / "every.html")
    sizes = browser.run("return [...document.images].map((one) => [one.complete, one.naturalWidth, one.offsetWidth])")
    assert len(sizes) == sum(kind.on_page and kind.workload is None for kind in PLOTS.values())
    assert all(done and natural > 300 and shown > 300 for done, natural, shown in sizes)
    figures = browser.driver.find_elements(By.CSS_SELECTOR, "figure")
    for figure in figures:
        button = figure.find_element(By.CSS_SELECTOR, ".explore")
        assert button.get_attribute("aria-pressed") == "false"
        browser.run("arguments[0].focus()", button)
        button.send_keys(Keys.ENTER)
        WebDriverWait(browser.driver, 30).until(
            lambda _, one=figure: one.find_elements(By.CSS_SELECTOR, ".explored svg text")  # type: ignore[misc]
        )
        assert button.get_attribute("aria-pressed") == "true"
        assert not figure.find_element(By.TAG_NAME, "img").is_displayed()
    figures[0].find_element(By.CSS_SELECTOR, ".explore").click()
    assert figures[0].find_element(By.TAG_NAME, "img").is_displayed()
    assert browser.complaints() == []
    assert browser.requests() == {(folder / "every.html").as_uri(): ""}


def test_hostile_strings_execute_nothing(browser: Browser, folder: Path) -> None:
    browser.open(folder / "hostile.html")
    for button in browser.driver.find_elements(By.CSS_SELECTOR, ".explore"):
        button.click()
    WebDriverWait(browser.driver, 30).until(
        lambda driver: len(driver.find_elements(By.CSS_SELECTOR, ".explored svg")) >= 2
    )
    assert browser.run("return window.hacked") is None
    assert browser.complaints() == []
    assert browser.requests() == {(folder / "hostile.html").as_uri(): ""}
    shown = browser.run("return document.body.innerText")
    assert "</script></style><script>window.hacked=1</script>\ufffd" in shown
    assert "{{ 7*7 }}" in shown


def test_the_page_works_by_keyboard(browser: Browser, folder: Path) -> None:
    browser.open(folder / "planted.html")
    browser.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    first = browser.driver.switch_to.active_element
    assert first.text == "Skip to the findings"
    assert browser.run("return arguments[0].getBoundingClientRect().top", first) >= 0
    first.send_keys(Keys.ENTER)
    assert browser.driver.switch_to.active_element.get_attribute("id") == "main"
    unnamed = browser.run(
        "return [...document.querySelectorAll('button, input, select')]"
        ".filter((one) => !(one.textContent.trim() || one.labels?.[0]?.textContent.trim())).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_every_width(browser: Browser, folder: Path, width: int) -> None:
    with resized(browser, width):
        for name in ("planted", "hostile"):
            browser.open(folder / f"{name}.html")
            assert browser.run("return document.documentElement.scrollWidth") <= width


def test_a_narrow_page_cuts_no_caption_and_shrinks_no_plot(browser: Browser, folder: Path) -> None:
    with resized(browser, 400):
        browser.open(folder / "planted.html")
        right = "return [...document.querySelectorAll(arguments[0])].map((one) => one.getBoundingClientRect().right)"
        assert max(browser.run(right, "section > .table caption")) <= 400
        images = browser.run("return [...document.images].map((one) => [one.naturalWidth, one.offsetWidth])")
        assert all(natural == shown for natural, shown in images)
        lead = head(browser, "glance", "lead [95 %]")
        assert browser.run("return arguments[0].getBoundingClientRect().right", lead) <= 400


def test_a_wide_page_has_the_notes_beside_the_plot(browser: Browser, folder: Path) -> None:
    with resized(browser, 1280):
        browser.open(folder / "every.html")
        tops = browser.run(
            "return [...document.querySelectorAll('#plot-memory .plot, #plot-memory figcaption')]"
            ".map((one) => one.getBoundingClientRect().top)"
        )
        assert abs(tops[0] - tops[1]) < 10


def test_the_status_is_visible_without_scrolling(browser: Browser, folder: Path) -> None:
    """Also in a table of many columns, in a window of 1,280 px."""
    with resized(browser, 1280):
        for name in ("planted", "every", "hostile"):
            browser.open(folder / f"{name}.html")
            status = browser.run(
                "return arguments[0].getBoundingClientRect().right", head(browser, "results", "status")
            )
            assert 0 < status <= 1280


def test_the_page_prints_whole_tables_and_plots(browser: Browser, folder: Path) -> None:
    browser.open(folder / "planted.html")
    browser.driver.find_element(By.CSS_SELECTOR, ".explore").click()
    WebDriverWait(browser.driver, 30).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, ".explored svg text"))
    browser.tell("Emulation.setEmulatedMedia", media="print")
    try:
        with resized(browser, 720, 1000):
            assert browser.run("return document.documentElement.scrollWidth") <= 720
            shown = browser.run("return [...document.images].filter((one) => one.offsetHeight > 0).length")
            assert shown == len(browser.driver.find_elements(By.TAG_NAME, "img"))
            for gone in (".controls", ".explored", "nav", ".explore"):
                assert not browser.driver.find_element(By.CSS_SELECTOR, gone).is_displayed()
    finally:
        browser.tell("Emulation.setEmulatedMedia", media="")
    paper = base64.b64decode(browser.tell("Page.printToPDF")["data"])
    assert paper.startswith(b"%PDF")
    assert len(paper) > 20_000


def test_the_page_is_complete_without_scripts(browser: Browser, folder: Path) -> None:
    browser.tell("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(folder / "large.html")
        assert browser.driver.find_elements(By.CSS_SELECTOR, ".controls, th button") == []
        rows = browser.driver.find_elements(By.CSS_SELECTOR, "#results tbody tr")
        assert len(rows) > 220
        assert rows[-1].is_displayed()
        assert browser.driver.find_element(By.TAG_NAME, "img").is_displayed()
    finally:
        browser.tell("Emulation.setScriptExecutionDisabled", value=False)


def test_long_tables_are_shown_in_part(browser: Browser, folder: Path) -> None:
    browser.open(folder / "large.html")
    assert len(cells(browser, "results", "strategy")) == 200
    holder = browser.driver.find_element(By.XPATH, "//table[@id='results']/ancestor::div[@data-grid]")
    status = holder.find_element(By.CSS_SELECTOR, "[role=status]")
    rows = int(status.text.partition(" ")[0])
    assert status.text == f"{rows} rows, the first 200 are shown"
    holder.find_element(By.XPATH, ".//button[text()='Show all']").click()
    assert (len(cells(browser, "results", "strategy")), status.text) == (rows, f"{rows} rows")
    assert browser.complaints() == []
