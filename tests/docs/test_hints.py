"""What we tell people to install is what an index has: Synkro itself is on none."""

import itertools
import re

import pytest

try:
    import tomllib
except ImportError:  # before Python 3.11, where pytest needs the same by another name
    import tomli as tomllib

from support.programs import ROOT

pytestmark = pytest.mark.quick

FILES = [
    *sorted((ROOT / "synkro").rglob("*.py")),
    *sorted((ROOT / "demos").glob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
OTHERS = {"pymc"}  # packages that pages name, and that none of our extras has


def oldest_versions():
    """Of each package that pyproject.toml's extras name, the oldest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = "\n".join(itertools.chain.from_iterable(project["optional-dependencies"].values()))
    found = re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", extras, re.MULTILINE)
    return dict(sorted(found, key=lambda pair: numbers(pair[1]), reverse=True))


def numbers(version):
    """A version as a tuple, where 13.0 is 13."""
    return tuple(map(int, version.removesuffix(".0").split(".")))


HINTS = {"name": r"pip install[^\n]*[\s'\"]synkro(?![\w/-])", "extra": r"\bsynkro\[\w+\](?![.(])"}


@pytest.mark.parametrize("hint", HINTS.values(), ids=HINTS)
def test_no_file_says_to_install_synkro_from_an_index(hint):
    assert [str(path) for path in FILES if re.search(hint, path.read_text())] == []


def test_requirements_in_hints_are_those_of_the_project():
    versions = oldest_versions()
    seen = set()
    for path in FILES:
        found = re.findall(r"['\"]([A-Za-z][\w-]*)(?:\[\w+\])?>=([\d.]+)['\"]", path.read_text())
        for name, version in found:
            assert name in {*versions, *OTHERS}, f"{path} names {name}"
            if name in versions:
                assert numbers(versions[name]) == numbers(version), f"{path} wants {name}>={version}"
            seen.add(name)
    assert {"cupy-cuda12x", "nvidia-nccl-cu13"} <= seen
