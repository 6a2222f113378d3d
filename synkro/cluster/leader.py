"""The process of MPI's on a host other than the main process's."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any, NoReturn

import numpy as np

from ..devices.gpus import visible
from .hello import hello
from .janitor import UNHEARD
from .orders import (
    Begin,
    Begun,
    Ended,
    GiveUp,
    Offered,
    Ordered,
    Recall,
    Shown,
    Tick,
    Tock,
    Traced,
    Wanted,
)
from .outpost import Outpost
from .questions import Clock, Echo, End, Hail, Leave, Look, Reach, Sees
from .wire import GATEWAY, SilenceError, Wire, library


class Leader:
    """Answers the gateway."""

    def __init__(self, wire: Wire, held: int) -> None:
        """*held* is what ``janitor.watch`` has returned."""
        self._wire = wire
        self._held = held

    def serve(self) -> None:
        """Answer one message after the other, until the last."""
        try:
            self._serve()
        except SilenceError:
            self._give_up()

    def _serve(self) -> None:
        while True:
            source, question = self._wire.next()
            if isinstance(question, Leave):
                self._wire.leave()
                break
            if isinstance(question, Begin):
                self._work(question)
                gc.collect()  # the mirrors
            else:
                self._answer(source, question)

    def _work(self, begin: Begin) -> None:
        """Serve a session until its end."""
        self._wire.live(begin.host_timeout)
        try:
            outpost = Outpost(self._wire, begin)
        except (OSError, RuntimeError) as error:
            self._wire.send(GATEWAY, Begun((), str(error)))
            self._wire.part()
            return
        self._wire.send(GATEWAY, Begun(outpost.pids))
        try:
            while not outpost.over:
                self._wire.rest(outpost.called, outpost.step, outpost.dozing)
                while (message := self._wire.receive()) is not None:
                    self._heed(outpost, *message)
            self._wire.part()
        except SilenceError:
            self._give_up()  # before the workers have ended, which may take long
        finally:
            outpost.close()

    def _heed(self, outpost: Outpost, source: int, message: object) -> None:
        match message:
            case Ordered():
                outpost.order(message)
            case Wanted():
                outpost.look_for(message)
            case Traced(on):
                outpost.trace(on)
            case Tick(sent):
                self._wire.send(GATEWAY, Tock(sent, time.perf_counter_ns()))
            case Shown() | Ended():
                outpost.hear(source, message)
            case Offered():
                outpost.accept(message)
            case Recall(number):
                outpost.recall(number)
            case GiveUp(number, ranks):
                outpost.interrupt(number, ranks)
            case End():
                outpost.dismiss()

    def _give_up(self) -> NoReturn:
        """End the host's part of it all: the gateway is not heard, and MPI would wait for it."""
        print(UNHEARD, file=sys.stderr, flush=True)
        os.write(self._held, b"!")  # mpiexec's process on this host may hear nothing either
        os._exit(1)  # which ends the workers

    def _answer(self, source: int, question: Any) -> None:
        match question:
            case Hail():
                self._wire.send(GATEWAY, hello(question, library()))
            case Look(shown):
                self._wire.send(GATEWAY, visible(shown))
            case Clock():
                self._wire.send(source, time.time())
            case Reach(_, other):
                self._wire.send(other, Clock())
                self._wire.next()
                self._wire.send(GATEWAY, True)
            case Sees(path):
                self._wire.send(GATEWAY, os.path.exists(path))
            case Echo(nbytes):
                body = np.empty(nbytes, np.uint8)
                self._wire.fill(GATEWAY, [body])
                self._wire.send(GATEWAY, nbytes, [body])
                self._wire.flush()
