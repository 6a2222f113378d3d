"""One line for the tests that need a GPU where there is none, in the place of one for each."""

import pytest

from synkro.devices.gpus import visible

_LEFT_OUT = pytest.StashKey[str]()


@pytest.hookimpl(trylast=True)  # what -m and -k leave out is not counted
def pytest_collection_modifyitems(config, items):
    needy = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not needy:
        return
    found = visible()
    if found.gpus:
        return
    items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=needy)
    tests = f"{len(needy)} tests" if len(needy) > 1 else "1 test"
    config.stash[_LEFT_OUT] = f"gpu: {tests} left out, as they need a GPU: {found.reason}"


def pytest_sessionfinish(session):
    """Under pytest-xdist, the processes that collect the tests hand the line to the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(_LEFT_OUT, "")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", "")


def pytest_terminal_summary(terminalreporter, config):
    if line := config.stash.get(_LEFT_OUT, ""):
        terminalreporter.write_line(line)
