"""Memory with a name: a name of a test's own, what is left of it, and the programs in C of the docs."""

import os
import re
import shutil
import signal
import subprocess
import uuid

import pytest

from support.programs import ROOT
from support.waiting import wait_until
from synkro.memory import named

PAGE = ROOT / "docs" / "howto" / "named_memory.md"


def files(name):
    """What lies in /dev/shm of a name: the memory, and its semaphores."""
    return sorted(found for found in os.listdir("/dev/shm") if name.lstrip("/") in found)


@pytest.fixture
def name():
    """A name of shared memory, of which nothing is left after the test."""
    name = f"/synkro-test-{uuid.uuid4().hex[:12]}"
    yield name
    try:
        assert wait_until(lambda: not files(name)), files(name)
    finally:
        for file in files(name):
            os.unlink(f"/dev/shm/{file}")


@pytest.fixture
def interrupted_making(monkeypatch):
    """Ctrl-C comes when memory with a name has just been made, and nobody has it yet."""
    make = named.create

    def interrupted(*args):
        segment = make(*args)
        signal.raise_signal(signal.SIGINT)
        return segment

    with monkeypatch.context() as patch:
        patch.setattr(named, "create", interrupted)
        yield patch


@pytest.fixture(scope="session")
def programs_in_c(tmp_path_factory):
    """The folder with the compiled programs of docs/howto/named_memory.md."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("c")
    for source in re.findall(r"^```c\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        file = re.match(r"/\* (\w+\.\w)", source)[1]
        (folder / file).write_text(source)
    for file in folder.glob("*.c"):
        command = ["cc", "-Wall", "-Wextra", "-Werror", "-o", folder / file.stem, file]
        subprocess.run([*command, "-lrt", "-pthread"], check=True)
    return folder
