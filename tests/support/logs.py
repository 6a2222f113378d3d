"""A logger for tests, and a handler that keeps its records."""

import logging

import pytest

log = logging.getLogger("tests.logs")


class Kept(logging.Handler):
    """Keeps records.

    ``said`` has their levels, messages and ranks.
    """

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def said(self):
        return [(record.levelname, record.getMessage(), record.rank) for record in self.records]


@pytest.fixture
def kept():
    """A handler of ``log``, which has level INFO."""
    handler = Kept()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
