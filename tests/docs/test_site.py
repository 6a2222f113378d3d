"""The documentation as a site: it is built here, its links are followed, and a browser looks at it.

The pages are opened as files, as a reader does who has built them: nothing comes from a network.
"""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote, urldefrag

import pytest

import synkro
from support.programs import ROOT

pytestmark = pytest.mark.site

DOCS = ROOT / "docs"

WIDTHS = {"a laptop": 1280, "a phone": 390}
MODES = ("light", "dark")
LOOKED_AT = ["index", "howto/tasks", "gallery/index", "reference/index", "reference/api/synkro.map"]
"""Pages of all kinds, that are looked at in dark, too."""


def built(folder, *options):
    """Build the site anew, without a warning."""
    for made in ("gallery", "reference/api"):
        shutil.rmtree(DOCS / made, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "-q", *options, str(DOCS), str(folder)]
    offline = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of a site whose demos did not run."""
    pytest.importorskip("sphinx")
    return built(tmp_path_factory.mktemp("site"), "-D", "plot_gallery=0")


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_all_demos_run_in_the_gallery(tmp_path):
    folder = built(tmp_path / "site")
    for demo in ROOT.glob("demos/demo_*.py"):
        page = (folder / "gallery" / f"{demo.stem}.html").read_text()
        assert "All assertions passed." in page or "pymc" in demo.stem, demo


def pages(site):
    """All pages; what themes bring along is none."""
    return sorted(set(site.rglob("*.html")) - set(site.glob("_static/**/*.html")))


class _Page(html.parser.HTMLParser):
    """What a page links to, and what can be linked to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.files, self.anchors = [], [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.add(found.get("id", ""))
        if tag == "a":
            self.links.append(found.get("href") or "")
        elif tag in ("img", "script"):
            self.files.append(found.get("src") or "")
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.files.append(found["href"])


@pytest.mark.timeout(300)
def test_links_lead_to_pages_and_anchors_that_there_are(site):
    read = {page.resolve(): _Page(page.read_text()) for page in pages(site)}
    assert len(read) > 120
    for page, content in read.items():
        for link in content.links:
            if not re.match(r"\w+:", link):
                name, anchor = urldefrag(link)
                target = (page.parent / unquote(name)).resolve() if name else page
                assert target.exists(), (page, link)
                assert target not in read or unquote(anchor) in read[target].anchors, (page, link)


@pytest.mark.timeout(300)
def test_pages_need_no_network(site):
    for page in pages(site):
        for file in filter(None, _Page(page.read_text()).files):
            assert not re.match(r"(\w+:)?//", file) or file.startswith("data:"), (page, file)
            assert (
                file.startswith("data:")
                or (page.parent / unquote(urldefrag(file)[0].split("?")[0])).exists()
            )


def test_every_public_name_and_every_demo_has_a_page(site):
    for name in synkro.__all__:
        assert (site / "reference" / "api" / f"synkro.{name}.html").exists(), name
    front = (site / "index.html").read_text()
    for demo in ROOT.glob("demos/demo_*.py"):
        page = (site / "gallery" / f"{demo.stem}.html").read_text()
        assert f"sphx_glr_{demo.stem}_001.png" in page, demo
        assert f"sphx_glr_{demo.stem}_thumb.png" in front, demo
        assert (DOCS / "_static" / "gallery" / f"{demo.stem}.png").exists(), demo


# ── in a browser ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    service = selenium.ChromeService(shutil.which("chromedriver"))
    with selenium.Chrome(options=options, service=service) as browser:
        yield browser


def show(browser, page, width, mode="light"):
    """Open a page as a device of this *width* shows it, and forget what was said of others."""
    browser.get_log("browser")
    device = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    features = [{"name": "prefers-color-scheme", "value": mode}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())


FAULTS = """
const wide = document.documentElement.scrollWidth > innerWidth + 1 ? ["wider than the window"] : [];
const broken = [...document.images].filter(each => each.complete && !each.naturalWidth);
return [...wide, ...broken.map(each => "no picture: " + each.src)];
"""


def faults(browser):
    return [*browser.execute_script(FAULTS), *(entry["message"] for entry in browser.get_log("browser"))]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("device", WIDTHS)
def test_each_page_fits_the_window_and_has_its_pictures(site, browser, device):
    found = {}
    for page in pages(site):
        show(browser, page, WIDTHS[device])
        found[str(page.relative_to(site))] = faults(browser)
    assert {page: each for page, each in found.items() if each} == {}


LIGHTNESS = """
const parts = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
const style = getComputedStyle(document.body);
return [style.color, style.backgroundColor].map(color => parts(color).reduce((a, b) => a + b) / 765);
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("page", LOOKED_AT)
def test_pages_are_light_or_dark_as_the_reader_has_it(site, browser, page, device, mode):
    show(browser, site / f"{page}.html", WIDTHS[device], mode)
    text, ground = browser.execute_script(LIGHTNESS)
    assert abs(text - ground) > 0.5
    assert (ground > text) == (mode == "light")
    assert faults(browser) == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("all_reduce", "synkro.all_reduce"),
        ("bootstrap", "A bootstrap"),
        ("SRUN_CPUS_PER_TASK", "SLURM"),
        ("WorkerDied", "WorkerDied"),
    ],
)
def test_a_search_finds_the_page(site, browser, words, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(f"{(site / 'search.html').as_uri()}?q={words}")
    found = WebDriverWait(browser, 30).until(
        lambda _: [
            each.text for each in browser.find_elements(By.CSS_SELECTOR, "#search-results li > a")
        ]
    )
    assert any(page in title for title in found), found


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """The page of the benchmarks, of some of their records."""
    pytest.importorskip("matplotlib")
    from benchmarks.report import write

    records = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    some = {name: records[name] for name in ("call_overhead", "collectives", "pools")}
    return write(some, tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", WIDTHS)
def test_the_report_of_the_benchmarks_fits_too(browser, report, device, mode):
    show(browser, report, WIDTHS[device], mode)
    assert (browser.execute_script(LIGHTNESS)[0] < 0.5) == (mode == "light")
    assert faults(browser) == []
