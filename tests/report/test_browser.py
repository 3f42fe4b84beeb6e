"""report.html in headless Chromium, without a network: values of result.json, sorting, filters, themes, widths, axe.

Chromium and its driver: apt-get install chromium chromium-driver. axe-core: npm install --prefix . --no-save axe-core.
"""

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from gnnpar.report.comparison import compare
from gnnpar.report.page import write_page
from gnnpar.report.runs import collect
from gnnpar.track.keys import PHASES
from planted_runs import DROP, OURS, Plant, accurate, plant, real_run

pytestmark = pytest.mark.slow
SAME = ("strategy", "model", "seed", "status", "provenance")
PAIRS = {name: name for name in SAME} | {  # attribute of a row -> path in result.json
    **{"worldSize": "world_size", "threadsPerRank": "threads_per_rank", "epochSeconds": "epoch_seconds.median"},
    **{"bytesPerEpoch": "bytes_per_epoch.total", "val": "metric.val", "test": "metric.test"},
    **{"testAtBestVal": "metric.test_at_best_val", "gradientCosine": "fidelity.cosine.mean"},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver on this machine; apt-get install chromium chromium-driver")
    webdriver: Any = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"]
    for flag in (*flags, "--host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.chrome.service.Service(driver)
    chrome = webdriver.Chrome(options=options, service=service)
    chrome.execute_cdp_cmd("Network.enable", {})
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs of two strategies and two seeds; then, planted, one of other epochs and one of another machine."""
    folder = tmp_path_factory.mktemp("sweep")
    result: dict[str, Any] = {}
    for i, strategy in enumerate(("single", "graph_parallel")):
        for seed in (0, 1):
            common = ("comm=threads", "epochs=8", "eval_every=2", "fidelity_every=4")
            result = real_run(folder / str(2 * i + seed), f"strategy={strategy}", f"seed={seed}", *common)
    measured: dict[str, Any] = {"provenance": "measured", "transport": "gloo"}
    plant(result, folder / "4", epoch=0.5, epochs=77, **measured)
    plant(result, folder / "5", epoch=0.25, hardware="another <machine>", **measured)
    plant(result, folder / "6", epoch=None, status="failed", error="rank 1: killed by SIGKILL", **measured)
    return folder


@pytest.fixture(scope="module")
def page(browser: Any, sweep: Path) -> Any:
    opened(browser, write_page(compare(collect([sweep])), sweep / "out" / "report.html"))
    return browser


def opened(browser: Any, file: Path, fragment: str = "") -> None:
    """Open a page, wait for its script to end and unfold all of it: `get` alone now and then returns while the page is
    still loading."""
    address = file.as_uri() + (f"#{fragment}" if fragment else "")
    browser.get(address)
    state = "return [location.href, document.readyState, document.documentElement.dataset.ready]"
    wanted = [address, "complete", "true"]
    deadline = time.monotonic() + 60
    while (found := browser.execute_script(state)) != wanted:
        assert time.monotonic() < deadline, f"not ready after 60 s: {found}"
        time.sleep(0.05)
    browser.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true; })")


def rows(page: Any) -> list[dict[str, str]]:
    """The data attributes of the rows that are seen, from top to bottom."""
    script = (
        "return [...document.querySelectorAll('#table tbody tr')].filter(r => !r.hidden).map(r => ({...r.dataset}))"
    )
    return page.execute_script(script)


def choose(page: Any, selector: str, value: str) -> None:
    page.execute_script(
        "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'));",
        selector,
        value,
    )


def complaints(page: Any) -> list[str]:
    return [entry["message"] for entry in page.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_it_opens_without_a_network_and_without_a_complaint(page: Any) -> None:
    assert complaints(page) == []
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert sent and {url.partition(":")[0] for url in sent} <= {"file", "data", "blob"}
    drawn = page.execute_script(
        "return [...document.querySelectorAll('figure[data-model]')].map(f => [f.id,"
        "f.querySelectorAll('.track i, .curves path[data-strategy]').length,"
        "f.querySelectorAll('.none:not([hidden])').length])"
    )
    assert len(drawn) >= 7 and all(marks for _, marks, _ in drawn), drawn
    assert [name for name, _, nothing in drawn if nothing] == ["speed-up-1"]  # of the 77 epochs
    assert page.find_element("css selector", "#speed-up-1 .none").text == "no ratio over this baseline"


def test_every_run_is_a_row_with_the_values_of_its_result(page: Any, sweep: Path) -> None:
    found = rows(page)
    assert [Path(row["folder"]).name for row in found] == ["0", "1", "2", "3", "4", "5", "6"]
    for row in found:
        result = json.loads((Path(row["folder"]) / "result.json").read_text())
        for attribute, path in PAIRS.items():
            value: Any = result
            for key in path.split("."):
                value = value[key]
            text = row[attribute]
            assert text == "" if value is None else type(value)(text) == value, (attribute, text, value)
        peak = result["memory_bytes"]["peak"]
        assert row["memoryPeakBytes"] == ("" if peak is None else str(max(peak)))


def test_it_sorts_by_exact_values_and_missing_ones_go_last(page: Any) -> None:
    head = page.find_element("css selector", "[data-sort=epoch_seconds]")
    for ascending in (True, False):
        head.click()
        times = [float(row["epochSeconds"]) for row in rows(page) if row["epochSeconds"]]
        assert times == sorted(times, reverse=not ascending) and len(times) == 6
        assert rows(page)[-1]["status"] == "failed"
        order = "ascending" if ascending else "descending"
        assert head.find_element("xpath", "..").get_attribute("aria-sort") == order
    page.find_element("css selector", "[data-sort=strategy]").click()
    names = [row["strategy"] for row in rows(page)]
    assert names == sorted(names)


def test_it_filters(page: Any) -> None:
    choose(page, "[data-filter=strategy]", "single")
    assert {row["strategy"] for row in rows(page)} == {"single"}
    assert page.find_element("id", "count").text == "2 of 7 runs"
    choose(page, "[data-filter=strategy]", "")
    choose(page, "#search", "another machine")
    assert [row["epochSeconds"] for row in rows(page)] == []
    choose(page, "#search", "sigkill")
    assert [row["status"] for row in rows(page)] == ["failed"]
    choose(page, "#search", "")
    assert len(rows(page)) == 7


def test_the_banner_names_both_mismatches(page: Any) -> None:
    banner = page.find_element("id", "unfair").text
    assert "equal epochs (77; single 8)" in banner
    assert "equal hardware (another <machine>; single " in banner
    assert page.find_element("id", "runs").text.count("rank 1: killed by SIGKILL") == 1


def test_themes_follow_the_system_and_the_button(page: Any) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    tick = "return getComputedStyle(document.querySelector('.plot .scale span')).color"
    seen = []
    for system in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": system}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.execute_async_script("setTimeout(arguments[0], 300)")
        seen.append((page.execute_script(ground), page.execute_script(tick)))
    assert seen[0] != seen[1] and seen[0][1] != seen[1][1]
    page.find_element("id", "theme").click()
    assert page.execute_script(ground) == seen[0][0]
    page.execute_script("localStorage.clear()")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert complaints(page) == []


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core's script; skips where it is not."""
    script = ROOT / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        pytest.skip("no axe-core in this checkout; npm install --prefix . --no-save axe-core@4.12.1")
    return script.read_text()


@pytest.fixture
def crowd(template: dict[str, Any], tmp_path: Path) -> Path:
    """A page of eleven configurations, more than there are colours, one of which has no fair ratio."""
    names = ("single", "graph_parallel", "sar", "adaqp", "gnnpipe", "hybrid", "bns", "cofree", "digest", "feature")
    for i, name in enumerate(names):
        ranks: dict[str, Any] = {"strategy": name} if name == "single" else OURS | {"strategy": name}
        old: dict[str, Any] = {"session": "an older one"} if name == "sar" else {}
        curve = [0.1, 0.5 - i / 500, 0.7 - i / 500]
        plant(template, tmp_path / name, epoch=1 + i / 10, curve=curve, **ranks, **old, **accurate(70))
    plant(template, tmp_path / "drop", curve=[0.1, 0.2, 0.3], **OURS | DROP, **accurate(30))
    return write_page(compare(collect([tmp_path])), tmp_path / "report.html")


@pytest.fixture
def sized(browser: Any) -> Iterator[Any]:
    """sized(width, theme): the browser as a screen of this width and a system of this theme; undone after the test."""

    def size(width: int, theme: str = "light") -> None:
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    yield size
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_axe_finds_nothing_and_the_body_does_not_scroll_sideways(
    browser: Any, sized: Any, crowd: Path, axe: str, width: int, theme: str
) -> None:
    sized(width, theme)
    opened(browser, crowd)
    seen = browser.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width - 20 < seen[0] == seen[1] <= width  # less a scroll bar
    browser.execute_script(axe)
    found = browser.execute_async_script("axe.run().then(arguments[0], arguments[0])")
    assert found["violations"] == [], json.dumps(
        [(v["id"], v["help"], [n["html"] for n in v["nodes"]][:3]) for v in found["violations"]], indent=1
    )
    assert len(found["passes"]) > 25  # it has looked at something
    rules = {rule["id"] for rule in found["passes"]}
    assert {"color-contrast", "label", "td-headers-attr", "region"} <= rules


def test_the_first_column_of_every_table_stays_on_a_phone(browser: Any, sized: Any, crowd: Path) -> None:
    sized(400)
    opened(browser, crowd)
    found = browser.execute_script(
        """return [...document.querySelectorAll(".scroll")].map((box) => {
          box.scrollIntoView();
          box.scrollLeft = 200;
          const row = box.querySelector("tbody tr:not(.task)"), cell = row.cells[0];
          const at = cell.getBoundingClientRect();
          const top = document.elementFromPoint(at.right - 5, at.top + at.height / 2);
          const missing = Math.min(200, box.scrollWidth - box.clientWidth) - box.scrollLeft;
          return [missing, at.left - box.getBoundingClientRect().left, cell.contains(top)];
        })"""
    )
    verdicts = (
        "return Math.max(...[...document.querySelectorAll('#groups td:nth-child(2)')]"
        ".map(cell => cell.offsetLeft + cell.offsetWidth))"
    )
    assert browser.execute_script(verdicts) < 372  # beside the first column, before the table is moved
    assert len(found) >= 2
    for missing, left, on_top in found:
        assert abs(missing) <= 1 and abs(left) <= 1 and on_top, found


def test_labels_of_curves_stand_apart_and_inside_the_picture(browser: Any, sized: Any, crowd: Path) -> None:
    for width in (400, 1400):
        sized(width)
        opened(browser, crowd)
        boxes = browser.execute_script(
            """const plot = document.getElementById("accuracy-against-time-0"), all = plot.getBoundingClientRect();
            return [...plot.querySelectorAll(".label:not([hidden])")].map((g) => g.getBoundingClientRect())
              .map((box) => [box.top, box.bottom, all.right - box.right])"""
        )
        assert len(boxes) == 6
        boxes.sort()
        assert all(above[1] <= below[0] + 1 for above, below in itertools.pairwise(boxes)), boxes
        assert all(room >= 0 for *_, room in boxes), boxes
        wide = browser.execute_script("return document.querySelector('#accuracy-against-time .plot').clientWidth")
        assert wide > 0.85 * min(width, 1280)  # one task fills the width


def test_the_strategy_filter_puts_a_grey_curve_in_colour(browser: Any, crowd: Path) -> None:
    opened(browser, crowd)
    tints = (
        "return [...document.querySelectorAll('#accuracy-against-time-0 svg [data-strategy]:not(.leader)')]"
        ".filter(t => getComputedStyle(t).stroke !== 'rgb(139, 148, 157)').map(t => t.dataset.strategy)"
    )
    assert "digest" not in browser.execute_script(tints)
    choose(browser, "[data-filter=strategy]", "digest")
    assert set(browser.execute_script(tints)) == {"digest"}
    labels = (
        "return [...document.querySelectorAll('#accuracy-against-time-0 .label:not([hidden])')].map(t => t.textContent)"
    )
    assert browser.execute_script(labels) == ["digest"]


def test_a_link_carries_filters_sorting_and_baseline(browser: Any, sweep: Path) -> None:
    file = write_page(compare(collect([sweep])), sweep / "out" / "linked.html")
    opened(browser, file)
    choose(browser, "[data-filter=strategy]", "graph_parallel")
    choose(browser, "#search", "gcn")
    choose(browser, "#baseline", "graph_parallel")
    for _ in range(2):
        browser.find_element("css selector", "[data-sort=epoch_seconds]").click()
    shown = rows(browser)
    address = browser.execute_script("return location.href")
    assert address == browser.find_element("id", "link").get_attribute("href")
    assert address.endswith("#strategy=graph_parallel&search=gcn&baseline=graph_parallel&sort=-epoch_seconds")
    browser.get("about:blank")
    opened(browser, file, address.partition("#")[2])
    assert rows(browser) == shown and len(shown) >= 2
    values = "return ['[data-filter=strategy]', '#search', '#baseline'].map(s => document.querySelector(s).value)"
    assert browser.execute_script(values) == ["graph_parallel", "gcn", "graph_parallel"]
    browser.execute_script("location.hash = 'strategy=nothing&model=gcn'")  # of another page: what is unknown is all
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert len(rows(browser)) == 7
    browser.execute_script("location.hash = 'runs'")  # a place, no filter
    assert complaints(browser) == []


def test_why_a_cell_is_blank_is_reached_by_the_keyboard(browser: Any, crowd: Path) -> None:
    opened(browser, crowd)
    browser.execute_script("document.querySelector('#groups .why').focus()")
    shown = browser.execute_script(
        "const e = document.activeElement; return [e.tabIndex, e.getAttribute('aria-label'),"
        "getComputedStyle(e, '::after').content]"
    )
    assert shown[0] == 0 and "was timed in another session" in shown[1] and "timed in another session" in shown[2]


def test_speed_ups_are_over_the_baseline_that_is_chosen(browser: Any, template: dict, tmp_path: Path) -> None:
    for seed in range(2):
        plant(template, tmp_path / f"a{seed}", seed=seed, epoch=4.0, **accurate(70 + seed))
        plant(template, tmp_path / f"b{seed}", seed=seed, epoch=1.0 + seed, **OURS, **accurate(70 + seed))
        plant(template, tmp_path / f"c{seed}", seed=seed, epoch=1.0, **OURS | DROP, **accurate(70 + seed))
    found = compare(collect([tmp_path]))
    opened(browser, write_page(found, tmp_path / "report.html"))
    assert browser.find_elements("id", "unfair") == []
    assert "not enough runs: 2 seeds" in browser.find_element("id", "notes").text
    diamonds = (
        "return [...document.querySelectorAll('#speed-up-0 .plot:not([hidden]) :is(i.value, i.hollow)')]"
        ".map(t => parseFloat(t.title))"
    )
    over = {
        group.first["strategy"]: group.speedup.value for group in found.groups if group.speedup and not group.control
    }
    assert over["graph_parallel"] == pytest.approx(8**0.5)
    assert browser.execute_script(diamonds)[:2] == [
        pytest.approx(over["single"], abs=1e-3),
        pytest.approx(over["graph_parallel"], abs=1e-3),
    ]
    choose(browser, "#baseline", "graph_parallel")
    assert browser.execute_script(diamonds)[:2] == [pytest.approx(8**-0.5, abs=1e-3), pytest.approx(1.0)]
    assert complaints(browser) == []


def test_a_run_that_lacks_everything_does_not_break_the_page(browser: Any, plant: Plant, tmp_path: Path) -> None:
    nothing = dict.fromkeys(("name", "train", "val", "test", "best_val", "test_at_best_val", "best_epoch"))
    lacks: dict[str, Any] = {"metric": nothing, "fidelity": None, "memory_bytes__peak": None}
    lacks |= {"breakdown_seconds": dict.fromkeys((*PHASES, "comm_total"), 0.0), "bytes_per_epoch__total": 0}
    plant(epoch=None, status="failed", error="</script><b>odd</b>", strategy="</script>", **lacks)
    opened(browser, write_page(compare(collect([tmp_path])), tmp_path / "report.html"))
    (row,) = rows(browser)
    assert (row["strategy"], row["error"]) == ("</script>", "</script><b>odd</b>")
    assert complaints(browser) == []
