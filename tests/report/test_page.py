"""report.html in headless Chromium, without a network: values of result.json, sorting, filters, banner, themes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gnnpar.report import colours
from gnnpar.report.comparison import compare
from gnnpar.report.page.page import context, render, write_page
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError
from gnnpar.track.keys import BYTE_PHASES, PHASES
from gnnpar.training.result.result import LIVE
from planted_runs import DROP, Plant, accurate, plant, real_run

OURS: dict[str, Any] = {"strategy": "graph_parallel", "world_size": 2, "transport": "gloo"}
PAIRS = {  # attribute of a row -> path in result.json
    "strategy": "strategy",
    "model": "model",
    "seed": "seed",
    "worldSize": "world_size",
    "status": "status",
    "threadsPerRank": "threads_per_rank",
    "provenance": "provenance",
    "epochSeconds": "epoch_seconds.median",
    "bytesPerEpoch": "bytes_per_epoch.total",
    "val": "metric.val",
    "test": "metric.test",
    "testAtBestVal": "metric.test_at_best_val",
    "gradientCosine": "fidelity.cosine.mean",
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
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(flag)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
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
            common = (
                f"strategy={strategy}",
                f"seed={seed}",
                "comm=threads",
                "epochs=8",
                "eval_every=2",
                "fidelity_every=4",
            )
            result = real_run(folder / str(2 * i + seed), *common)
    measured: dict[str, Any] = {"provenance": "measured", "transport": "gloo"}
    plant(result, folder / "4", median=0.5, epochs=77, **measured)
    plant(result, folder / "5", median=0.25, hardware="another <machine>", **measured)
    plant(result, folder / "6", median=None, status="failed", error="rank 1: killed by SIGKILL", **measured)
    return folder


@pytest.fixture(scope="module")
def page(browser: Any, sweep: Path) -> Any:
    opened(browser, write_page(compare(collect([sweep])), sweep / "out" / "report.html"))
    return browser


def opened(browser: Any, file: Path) -> None:
    """Open a page and wait for its script to end: `get` alone now and then returns while the page is still loading."""
    browser.get(file.as_uri())
    state = "return [location.href, document.readyState, document.documentElement.dataset.ready]"
    wanted = [file.as_uri(), "complete", "true"]
    deadline = time.monotonic() + 60
    while (found := browser.execute_script(state)) != wanted:
        assert time.monotonic() < deadline, f"not ready after 60 s: {found}"
        time.sleep(0.05)


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
        "return [...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('svg').length])"
    )
    assert len(drawn) >= 7 and [name for name, count in drawn if not count] == ["speed-up-1"], drawn
    assert page.find_element("id", "speed-up-1").text == "no ratio over this baseline"  # of the 77 epochs


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
    tick = "return getComputedStyle(document.querySelector('.plot .ytick text')).fill"
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


def test_a_phone_scrolls_tables_not_the_page(page: Any) -> None:
    size = {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.execute_async_script("setTimeout(arguments[0], 500)")
    assert page.execute_script("return document.documentElement.scrollWidth") == 380
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.execute_async_script("setTimeout(arguments[0], 300)")


def test_speed_ups_are_over_the_baseline_that_is_chosen(browser: Any, template: dict, tmp_path: Path) -> None:
    for seed in range(2):
        plant(template, tmp_path / f"a{seed}", seed=seed, median=4.0, **accurate(70 + seed))
        plant(template, tmp_path / f"b{seed}", seed=seed, median=1.0 + seed, **OURS, **accurate(70 + seed))
        plant(template, tmp_path / f"c{seed}", seed=seed, median=1.0, **OURS | DROP, **accurate(70 + seed))
    found = compare(collect([tmp_path]))
    opened(browser, write_page(found, tmp_path / "report.html"))
    assert browser.find_elements("id", "unfair") == []
    assert "not enough runs: 2 seeds" in browser.find_element("id", "notes").text
    diamonds = (
        "return document.getElementById('speed-up-0').data.filter(t => String(t.marker.symbol).startsWith('diamond'))"
        ".map(t => t.x[0])"
    )
    over = {
        group.first["strategy"]: group.speedup.value for group in found.groups if group.speedup and not group.control
    }
    assert over["graph_parallel"] == pytest.approx(8**0.5)
    assert browser.execute_script(diamonds)[:2] == [
        pytest.approx(over["single"]),
        pytest.approx(over["graph_parallel"]),
    ]
    choose(browser, "#baseline", "graph_parallel")
    assert browser.execute_script(diamonds)[:2] == [pytest.approx(8**-0.5), pytest.approx(1.0)]
    assert complaints(browser) == []


def test_a_run_that_lacks_everything_does_not_break_the_page(browser: Any, plant: Plant, tmp_path: Path) -> None:
    nothing = dict.fromkeys(("name", "train", "val", "test", "best_val", "test_at_best_val", "best_epoch"))
    plant(
        median=None,
        status="failed",
        error="</script><b>odd</b>",
        metric=nothing,
        fidelity=None,
        memory_bytes__peak=None,
        breakdown_seconds={},
        bytes_per_epoch__total=0,
        strategy="</script>",
    )
    opened(browser, write_page(compare(collect([tmp_path])), tmp_path / "report.html"))
    (row,) = rows(browser)
    assert (row["strategy"], row["error"]) == ("</script>", "</script><b>odd</b>")
    assert complaints(browser) == []


def test_pictures_of_schedules_are_shown_where_runs_left_them(plant: Plant, tmp_path: Path) -> None:
    plant("0")
    assert "Schedules" not in render(compare(collect([tmp_path])))
    (tmp_path / "0" / "schedule.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    assert "data:image/svg+xml;base64,PHN2Zy" in render(compare(collect([tmp_path])))


def test_every_part_of_time_bytes_and_memory_has_a_colour() -> None:
    assert set(colours.TIME) == set(PHASES)
    assert set(colours.BYTES) == set(BYTE_PHASES)
    assert set(colours.MEMORY) == set(LIVE)  # a category without one would be missing from the bars


def test_what_is_unfair_is_blank_and_never_the_fastest(plant: Plant, tmp_path: Path) -> None:
    plant(median=2.0, session="a")
    plant(median=0.5, session="b", **OURS)  # resumed on another day
    found = context(compare(collect([tmp_path])))
    ((_, lines),) = found["answers"]
    assert lines[0].name == "single"
    ours = next(row for _, rows in found["group_rows"] for row in rows if row.group.first["strategy"] != "single")
    assert (ours.cells["x single"].text, ours.cells["x single"].why) == ("-", "single was timed in another session")
    assert 'title="single was timed in another session"' in render(compare(collect([tmp_path])))


def test_a_folder_is_no_file(plant: Plant, tmp_path: Path) -> None:
    plant("0")
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        write_page(compare(collect([tmp_path])), tmp_path)
