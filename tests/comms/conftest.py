"""What holds for the tests of collectives."""

from support.sessions import by_value


def pytest_itemcollected(item):
    by_value(item)
