"""The distributions: what is in them, and that tools for packages find nothing to say."""

import fcntl
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import synkro
from support.programs import ROOT

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]


def run(*command, cwd=ROOT):
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    with open(tmp_path_factory.getbasetemp().parent / "builds", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at a time would write to one folder of the checkout
        run("build", "--outdir", str(folder))
    return folder


@pytest.fixture(scope="module")
def sources(built):
    """The folder of the unpacked source distribution."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(built, filter="data")
    return built / archive.name.removesuffix(".tar.gz")


def test_tools_are_content(built):
    files = sorted(map(str, built.glob("synkro-*")))
    assert [re.search(r"(whl|tar\.gz)$", file)[0] for file in files] == ["whl", "tar.gz"]
    assert run("twine", "check", "--strict", *files).count("PASSED") == 2
    run("check_wheel_contents", files[0])
    run("validate_pyproject", "pyproject.toml")


def test_the_wheel_has_the_package_only(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    info = f"synkro-{synkro.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"synkro", info}
    assert "synkro/py.typed" in names
    has = {name for name in names if name.endswith(".py")}
    assert has == {str(file.relative_to(ROOT)) for file in (ROOT / "synkro").rglob("*.py")}
    entry = zipfile.ZipFile(wheel).read(f"synkro-{synkro.__version__}.dist-info/entry_points.txt")
    assert b"synkro = synkro.__main__:main" in entry


def test_the_source_distribution_has_all_that_is_tracked(sources):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    for name in listed.stdout.splitlines():
        if name.partition("/")[0] not in (".github", ".gitignore", ".pre-commit-config.yaml", ".conda"):
            assert (sources / name).exists(), name


def test_quick_tests_run_from_the_source_distribution(sources):
    files = ("tests/calls/test_plan.py", "tests/calls/test_function.py")
    out = run("pytest", "-m", "quick", "-p", "no:cacheprovider", *files, cwd=sources)
    assert re.search(r"[1-9]\d+ passed", out)


def test_the_command_is_installed_beside_python():
    command = Path(sys.executable).with_name("synkro")
    done = subprocess.run([command, "info", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert synkro.__version__ in done.stdout
    usage = subprocess.run([command, "--help"], capture_output=True, text=True).stdout
    assert usage.startswith("usage: synkro ")


def test_the_version_is_said_once():
    for name in ("CITATION.cff", ".conda/meta.yaml"):
        text = (ROOT / name).read_text()
        found = re.findall(r"^(?:\{% set )?version ?[:=] \"?([\d.]+)", text, re.MULTILINE)
        assert found == [synkro.__version__], name
    assert f"## {synkro.__version__} - 20" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("url", [None, "https://example.org/owner/synkro"])
def test_links_of_the_readme_are_absolute_where_the_project_has_a_place(monkeypatch, url):
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    text = (ROOT / "setup.py").read_text()
    if url is not None:
        assert "\nURL = None\n" in text
        text = text.replace("\nURL = None\n", f"\nURL = {url!r}\n")
    exec(compile(text, "setup.py", "exec"), {"__file__": str(ROOT / "setup.py"), "__name__": "setup"})
    links = re.findall(r"\]\(([^)]+)\)", given["long_description"])
    relative = [link for link in links if not link.startswith(("https://", "http://", "#"))]
    assert bool(relative) == (url is None)
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        if not link.startswith(("http", "#")):
            assert (ROOT / link.partition("#")[0]).exists(), link
            assert url is None or any(each.endswith(f"/main/{link}") for each in links)
    assert given["project_urls"] == ({} if url is None else given["project_urls"])
