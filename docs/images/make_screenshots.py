"""Photograph a report.html for the documents: light and dark at 1280 pixels.

    make demo && python docs/images/make_screenshots.py outputs/demo/report.html

Needs Chromium and its driver (apt-get install chromium chromium-driver) and the extra [dev].
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

HERE = Path(__file__).parent
SHOTS = {
    "report-light": (1280, 1180, "light"),
    "report-dark": (1280, 1180, "dark"),
}


def main(page: Path) -> None:
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    for name, (width, height, theme) in SHOTS.items():
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(page.resolve().as_uri())
        while browser.execute_script("return document.documentElement.dataset.ready") != "true":
            time.sleep(0.1)
        taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        picture = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
        picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            HERE / f"{name}.png", optimize=True
        )
    browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
