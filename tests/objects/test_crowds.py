"""Globals that hold many objects, each of which may change: they are compared as a whole."""

from functools import cached_property

import pytest

from support.sessions import start
from synkro import InvalidValue

pytestmark = pytest.mark.long

MANY = 22_000


class Cell:
    def __init__(self, value):
        self.value = value
        self.once = None


class Lazy:
    def __init__(self, value):
        self.value = value

    @cached_property
    def double(self):
        return 2 * self.value


def _first(entry):
    return entry["a"] if isinstance(entry, dict) else entry[0]


KINDS = {
    "list of lists": lambda: [[i] for i in range(MANY)],
    "list of dicts": lambda: [{"a": i} for i in range(MANY)],
    "dict of lists": lambda: {i: [i] for i in range(MANY)},
}


def _put(entry, value):
    entry["a" if isinstance(entry, dict) else 0] = value


@pytest.fixture(scope="module")
def session():
    with start(2) as session:
        session.map(len, [""])  # which makes the queue
        yield session


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_map_brings_what_has_changed_within(session, make):
    tab = make()
    get = lambda k: _first(tab[k])  # noqa: E731
    assert session.map(get, range(3)) == [0, 1, 2]
    for value in (-5, -6):
        _put(tab[1], value)
        assert session.map(get, range(3)) == [0, value, 2]
        assert session.map(lambda k: _first(tab[k]), [1]) == [value]


def test_instances_and_their_class(session):
    class Own(Cell):
        scale = 1

    tab = [Own(i) for i in range(MANY)]
    get = lambda k: tab[k].value * tab[k].scale  # noqa: E731
    assert session.map(get, range(3)) == [0, 1, 2]
    tab[1].value = -5
    assert session.map(get, range(3)) == [0, -5, 2]
    Own.scale = 10
    assert session.map(get, range(3)) == [0, -50, 20]
    tab.append(Own(7))
    del tab[0]
    assert session.map(get, [0, -1]) == [-50, 70]


def test_an_object_that_others_use_is_one_object_there(session):
    shared = Cell(1)
    tab = [[shared] for _ in range(MANY)]
    use = session.function(lambda: shared.value, outputs=None)
    assert use() == [1, 1]
    get = lambda k: tab[k][0].value  # noqa: E731
    same = lambda k: tab[k][0] is shared  # noqa: E731
    assert session.map(get, [0, 9]) == [1, 1]
    shared.value = 2
    assert session.map(get, [0, 9]) == [2, 2]
    assert session.map(same, [0, 9]) == [True, True]


def test_a_function_compares_it_when_it_comes_again(session):
    tab = [[i] for i in range(MANY)]
    one = session.function(lambda: tab[1][0], outputs=None)
    assert one() == [1, 1]
    tab[1][0] = -4
    assert one() == [-4, -4]  # the second call looks at all
    tab[1][0] = -5
    assert one() == [-4, -4]
    with pytest.warns(UserWarning, match=r"synk.push\(tab\)"):
        assert one() == [-5, -5]
    tab[1][0] = -6
    two = session.function(lambda: tab[1][0], outputs=None)
    assert two() == [-6, -6]
    assert one() == [-6, -6]


def test_what_a_function_changes_on_the_workers_goes_on_until_both_have_changed_it(session):
    tab = [[i] for i in range(MANY)]

    def count():
        tab[1][0] += 1
        return tab[1][0]

    counting = session.function(count, outputs=None)
    assert [counting()[0] for _ in range(5)] == [2, 3, 4, 5, 6]
    other = session.function(lambda: tab[1][0], outputs=None)
    assert other() == [6, 6]
    tab[2][0] = -5
    with pytest.raises(InvalidValue, match=r"synk.push\(tab\)"):
        session.function(lambda: tab[2][0], outputs=None)()
    session.push(tab)
    assert other() == [1, 1]


def test_tasks_may_prepare_attributes_until_the_program_changes_something(session):
    tab = [Lazy(i) for i in range(MANY)]
    get = lambda k: tab[k].double  # noqa: E731
    assert session.map(get, range(50)) == list(range(0, 100, 2))
    tab[1].value = 5
    assert session.map(get, range(3)) == [0, 10, 4]


def test_numbers_of_a_large_dict_travel_one_by_one(session):
    table = dict.fromkeys(range(30_000), 0)

    def count():
        table[1] += 1
        return table[1], table[2]

    counting = session.function(count, outputs=None)
    assert counting()[0] == (1, 0)
    table[2] = 7
    assert session.function(lambda: (table[1], table[2]), outputs=None)()[0] == (1, 7)


def test_a_list_may_become_long_and_a_crowd_short(session):
    tab, crowd = [[0]], [[i] for i in range(MANY)]
    get = lambda k: (tab[k][0], crowd[k][0])  # noqa: E731
    assert session.map(get, [0]) == [(0, 0)]
    tab += [[i] for i in range(1, MANY)]
    del crowd[5:]
    assert session.map(get, [1, 4]) == [(1, 1), (4, 4)]
    tab[1][0] = crowd[1][0] = -5
    assert session.map(get, [1, 4]) == [(-5, -5), (4, 4)]
