"""Takes ``report.png``: the page that ``qflow report`` writes, in headless Chromium.

``python docs/images/report.py`` takes a quarter of a minute and writes the picture beside itself.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Run the example, and take a picture of its report."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary, "report.html")
        sys.argv = ["flow_report.py", str(target)]
        runpy.run_path(str(folder.parents[1] / "examples" / "flow_report.py"))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1100, "height": 1500}, color_scheme="light")
            page.goto(target.as_uri())
            page.wait_for_selector("canvas")
            page.screenshot(path=folder / "report.png")
            browser.close()


if __name__ == "__main__":
    main()
