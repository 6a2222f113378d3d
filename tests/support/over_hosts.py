"""Hosts for tests, and ``pytest --over h1,h2 --launcher PROGRAM``: all sessions are over these.

Tests that are marked ``one_host`` are left out then, and those with a single worker, which has one.
"""

import functools

import pytest

from synkro.controller import session
from synkro.controller.placement.choice import choose
from synkro.controller.placement.machines import Machines, machines_of
from synkro.plan.split import split

from .hosts import Hosts, processes_of
from .waiting import wait_until


def pytest_addoption(parser):
    parser.addoption("--over", default="", help="hosts to which the sessions of the tests go")
    parser.addoption("--launcher", default="ssh", help="what reaches them; called as ssh is")


def pytest_configure(config):
    names = config.getoption("over").split(",")
    if names != [""]:
        launcher = config.getoption("launcher")
        session.machines_of = functools.partial(over, names, launcher)


def pytest_collection_modifyitems(config, items):
    if config.getoption("over"):
        left_out = [item for item in items if of_one_host(item)]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def of_one_host(item):
    workers = item.callspec.params.get("forked") if hasattr(item, "callspec") else None
    return workers == 1 or item.get_closest_marker("one_host") is not None


def over(names, launcher, hosts, own_launcher, *rest):
    """The machines of a session, as many workers as on one host: the last hosts have fewer, or none."""
    *reached_by, start_timeout, n_parallel, devices, environment_value = rest
    if hosts is not None:
        return machines_of(hosts, own_launcher, *rest)
    assignments = choose(n_parallel, devices, environment_value)
    ranks = split(0, len(assignments), len(names))
    hosts = [f"{name}:{stop - start}" for name, (start, stop) in zip(names, ranks, strict=True)]
    found = [host for host in hosts if not host.endswith(":0")]
    machines = machines_of(found, launcher, *reached_by, start_timeout, None, "cpu", None)
    return Machines(machines.hosts, [1] * len(found), assignments, machines.pool)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Three of them."""
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), ["h1", "h2", "h3"])
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


@pytest.fixture
def nothing_left_there(hosts, tmp_path):
    """After the test none of the processes is there that its programs started, nor shared memory."""
    yield

    def left():
        return processes_of(tmp_path), hosts.shared_files()

    assert wait_until(lambda: not any(left()), seconds=10), left()
