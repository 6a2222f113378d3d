"""Tables and columns that functions read as globals, and that the program writes to between calls."""

import os
import signal
import warnings
from unittest import mock

import numpy as np
import pytest

import synkro
from support.sessions import lasting, running
from synkro.errors import InvalidValue, WorkerDied

pytestmark = [pytest.mark.libraries, pytest.mark.counted_once]

session = lasting(2)


class Holder:
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize("target", [None, 0, [0, 1]])
def test_a_large_table_is_looked_at_in_calls_that_get_rarer(session, target):
    pd = pytest.importorskip("pandas", reason="needs pandas")
    large = pd.DataFrame({"v": np.zeros(60_000)})
    f = session.function(lambda: large["v"].sum(), outputs="max", target=target)
    f()
    seen, said = [], []
    for number in range(1, 40):
        large.at[0, "v"] = number
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seen += [number] if f() == number else []
        said += [str(each.message) for each in told]
    assert said
    assert all("the object 'large', which the function" in each for each in said)
    assert len(seen) >= 4
    session.push(large)
    assert f() == 39


def test_what_both_sides_have_prepared_alike_is_no_contradiction(session):
    """Reading may set an attribute: xarray's ``attrs`` are made when they are first asked for."""

    class Lazy:
        _notes = None

        @property
        def notes(self):
            if self._notes is None:
                self._notes = {"units": ["m", "s"]}
            return self._notes

    lazy = Lazy()
    f = session.function(lambda: lazy.notes["units"][0], outputs=None)
    assert f() == ["m", "m"]
    assert lazy.notes["units"] == ["m", "s"]
    assert f() == ["m", "m"]
    lazy.notes["units"].append("kg")
    g = session.function(lambda: len(lazy.notes["units"]), outputs=None)
    assert g() == [3, 3]
    other = Lazy()
    h = session.function(
        lambda: other.notes["units"].append("A") or len(other.notes["units"]), outputs=None
    )
    assert h() == [3, 3]
    other.notes["units"].append("B")
    with pytest.raises(InvalidValue, match="has changed here and on the workers"):
        h()


def grow(t):
    t.loc[len(t)] = [synkro.rank(), 1]


def add(t):
    t["v"] += 1 + synkro.rank()


def column(t):
    t[f"new{t.shape[1]}"] = t["v"] * 2


@pytest.mark.parametrize("change", [grow, add, column])
@pytest.mark.parametrize("way", ["idle", "map"])
def test_a_worker_that_takes_a_place_has_the_table_of_the_one_before(change, way):
    pd = pytest.importorskip("pandas", reason="needs pandas")

    def make():
        return pd.DataFrame({"v": np.arange(3), "w": [1, 2, 3]})

    held = Holder(make())

    def step():
        change(held.held)
        return held.held.to_numpy().tolist(), list(held.held.columns)

    with running(2, replace=way == "idle") as session:
        run = synkro.function(step, outputs=None)
        assert len(run()) == 2
        if way == "idle":
            os.kill(session.pids[1], signal.SIGKILL)
            with pytest.raises(WorkerDied, match="taken its place"):
                run()
        else:
            synkro.map(lambda x: os._exit(1) if x < 2 else x, range(5), errors="return", chunksize=1)
        for rank, (values, columns) in enumerate(run()):
            serial = make()
            for _ in range(2):
                with mock.patch.object(synkro, "rank", lambda rank=rank: rank):
                    change(serial)
            assert values == serial.to_numpy().tolist()
            assert columns == list(serial.columns)
