"""The process of MPI's beside the main process, which stays outside of MPI."""

from __future__ import annotations

import contextlib
import gc
import select
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..ipc.descriptors import Descriptors
from .dispatch import Dispatch
from .hello import Hello, hello
from .orders import Begin, Begun, Silent
from .questions import Clock, Distance, Distances, Echo, End, Hail, Leave, Look, Reach, Sees
from .wire import BEAT, SilenceError, Wire, library

_ROUNDS = 30  # messages there and back whose times are compared
_BULK = 1 << 24  # bytes by which the bandwidth is measured


class Gateway:
    """Stands between the main process and the leaders."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._leaders = range(1, wire.count)

    def serve(self, main: Connection, printed: Connection, descriptors: Descriptors) -> None:
        """Do what the main process asks, until it has no more questions, or is gone.

        *printed* is where it hears what workers print, *descriptors* where it sends those of its memory.

        Raises: SilenceError if a host is lost: the main process knows that, and has hung up.
        """
        with (
            contextlib.closing(descriptors),
            printed,
            main,
            contextlib.suppress(EOFError, ConnectionError),
        ):
            while not isinstance(question := self._heard(main), End):
                if isinstance(question, Begin):
                    self._work_until_silence(question, main, printed, descriptors)
                    break
                main.send(self._answer(question))
        gc.collect()  # the main process's memory, which is mapped here

    def _heard(self, main: Connection) -> Any:
        """What the main process says next."""
        while not main.poll(BEAT):
            self.beat()
        return main.recv()

    def beat(self) -> None:
        """Let the leaders hear of this process, a second after the last time at the earliest."""
        self._wire.beat()

    def end(self) -> None:
        """End the leaders."""
        for leader in self._leaders:
            self._wire.send(leader, Leave())
        self._wire.leave()

    # ── a session ────────────────────────────────────────────────────────────────────────────────

    def _work_until_silence(
        self, begin: Begin, main: Connection, printed: Connection, descriptors: Descriptors
    ) -> None:
        """Serve a session until its end, or until a host is lost: then all is up to the main process."""
        try:
            self._work(begin, main, printed, descriptors)
        except SilenceError as error:
            with contextlib.suppress(EOFError, OSError):
                main.send(Silent(error.host))
                main.recv()
            raise

    def _work(
        self, begin: Begin, main: Connection, printed: Connection, descriptors: Descriptors
    ) -> None:
        """Serve a session until its end."""
        with contextlib.closing(Dispatch(self._wire, main, printed, descriptors, begin)) as dispatch:
            for leader in self._leaders:
                self._wire.send(leader, begin)
            with contextlib.suppress(EOFError, ConnectionError):
                self._pass_on(begin, main, dispatch)
            for leader in self._leaders:
                self._wire.send(leader, End())
            self._wire.part(dispatch.hear_late)

    def _pass_on(self, begin: Begin, main: Connection, dispatch: Dispatch) -> None:
        def step() -> bool:
            return dispatch.step() or bool(asked.poll(0))

        begun: dict[int, Begun] = {}
        asked = select.poll()  # which takes less than main.poll()
        asked.register(main.fileno(), select.POLLIN)
        if not self._leaders:
            main.send([])
        self._wire.live(begin.host_timeout)
        while True:
            while (message := self._wire.receive()) is not None:
                source, said = message
                if isinstance(said, Begun):
                    begun[source] = said
                    dispatch.tick([source])
                    if len(begun) == len(self._leaders):
                        main.send([begun[leader] for leader in self._leaders])
                else:
                    dispatch.hear(source, said)
            if asked.poll(0) and not dispatch.heed():
                return
            if self._wire.rest(dispatch.called, step, dispatch.dozing):
                dispatch.tick(list(begun))

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    def _answer(self, question: Any) -> Any:
        match question:
            case Hail():
                return self._hellos(question)
            case Look():
                return self._asked_all(question)
            case Distances(path):
                return [self._distance(leader, path) for leader in self._leaders]
            case Reach(leader):
                return self._asked(leader, question)

    def _hellos(self, hail: Hail) -> list[Hello]:
        return [hello(hail, library()), *self._asked_all(hail)]

    def _asked_all(self, question: Any) -> list[Any]:
        """What each leader answers."""
        for leader in self._leaders:
            self._wire.send(leader, question)
        said = dict(self._wire.next() for _ in self._leaders)
        return [said[leader] for leader in self._leaders]

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
