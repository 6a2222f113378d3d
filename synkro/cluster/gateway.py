"""The process of MPI's beside the main process, which stays outside of MPI."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..ipc.descriptors import Descriptors
from .dispatch import Dispatch
from .hello import Hello
from .orders import Begin, Begun, Silent
from .questions import Clock, Distance, Distances, Echo, End, Reach, Sees
from .wire import Nap, SilenceError, Wire, wait_until

_ROUNDS = 30  # messages there and back whose times are compared
_BULK = 1 << 24  # bytes by which the bandwidth is measured


class Gateway:
    """Stands between the main process and the leaders."""

    def __init__(
        self, wire: Wire, main: Connection, printed: Connection, descriptors: Descriptors
    ) -> None:
        """*printed* is where the main process hears what workers print, *descriptors* where it sends
        those of its memory."""
        self._wire = wire
        self._main = main
        self._printed = printed
        self._descriptors = descriptors
        self._leaders = range(1, wire.count)

    def serve(self, own: Hello) -> None:
        """Tell the main process who is there; then do what it asks, until it has no more questions."""
        said = {0: own}
        for _ in self._leaders:
            source, each = self._wire.next()
            said[source] = each
        self._main.send([said[number] for number in range(self._wire.count)])
        while not isinstance(question := self._heard(), End):
            if isinstance(question, Begin):
                self._work_until_silence(question)
                break
            self._main.send(self._answer(question))
        for leader in self._leaders:
            self._wire.send(leader, End())
        self._wire.flush()

    def _heard(self) -> Any:
        """The next question."""
        wait_until(self._main.poll)
        return self._main.recv()

    # ── a session ────────────────────────────────────────────────────────────────────────────────

    def _work_until_silence(self, begin: Begin) -> None:
        """Serve a session until its end, or until a host is lost: then all is up to the main process."""
        try:
            self._work(begin)
        except SilenceError as error:
            self._main.send(Silent(error.host))
            with contextlib.suppress(EOFError, OSError):
                self._main.recv()
            os._exit(1)  # MPI would wait for the host

    def _work(self, begin: Begin) -> None:
        """Serve a session until its end."""
        for leader in self._leaders:
            self._wire.send(leader, begin)
        dispatch = Dispatch(self._wire, self._main, self._printed, self._descriptors, begin)
        begun: dict[int, Begun] = {}
        if not self._leaders:
            self._main.send([])
        nap = Nap()
        self._wire.live(begin.host_timeout)
        while True:
            if self._wire.beat():
                dispatch.tick(list(begun))
            news = dispatch.step()
            while (message := self._wire.receive()) is not None:
                news = True
                source, said = message
                if isinstance(said, Begun):
                    begun[source] = said
                    dispatch.tick([source])
                    if len(begun) == len(self._leaders):
                        self._main.send([begun[leader] for leader in self._leaders])
                else:
                    dispatch.hear(source, said)
            if self._main.poll():
                news = True
                if not dispatch.heed():
                    return
            nap.take(news, dispatch.doze)

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    def _answer(self, question: Any) -> Any:
        match question:
            case Distances(path):
                return [self._distance(leader, path) for leader in self._leaders]
            case Reach(leader):
                return self._asked(leader, question)

    def _distance(self, leader: int, path: str) -> Distance:
        """What lies between here and a host."""
        times, leads = [], []
        for _ in range(_ROUNDS):
            start, before = time.perf_counter(), time.time()
            then = self._asked(leader, Clock())
            times.append(time.perf_counter() - start)
            leads.append((times[-1], then - (before + times[-1] / 2)))
        _, ahead = min(leads)  # the quickest answer tells the time best
        return Distance(
            statistics.median(times) / 2,
            max(self._bandwidth(leader) for _ in range(3)),
            ahead,
            self._asked(leader, Sees(path)),
        )

    def _asked(self, leader: int, question: Any) -> Any:
        self._wire.send(leader, question)
        return self._wire.next()[1]

    def _bandwidth(self, leader: int) -> float:
        there, back = np.zeros(_BULK, np.uint8), np.empty(_BULK, np.uint8)
        start = time.perf_counter()
        self._wire.send(leader, Echo(_BULK), [there])
        self._wire.next()
        self._wire.fill(leader, [back])
        return 2 * _BULK / (time.perf_counter() - start)
