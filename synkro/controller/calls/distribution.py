"""How functions get to the workers, with all that they use.

``Services`` are the parts of a session by which its functions and maps work.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidType
from ...ipc.channel import Lane
from ...messages import Distribute, FunctionSpec, Phase
from ...packing import place, settings
from ..engine.engine import Engine
from ..objects.comparison import Assigned
from ..objects.known import Known, Snapshot
from ..objects.objects import Objects
from ..objects.watch import Watch
from ..progress import Progress, status_line
from ..results.transfer import Outputs
from ..variables.registry import Variables
from .background import Background
from .replacement import Replacement

_PATIENCE = 2.0  # seconds before a distribution shows how far it is


class Distribution:
    """Brings the functions of a session to the workers.

    Attributes:
        sent: what they got with the last ones: where to import from, the folder, and settings.
    """

    def __init__(self, engine: Engine, objects: Objects) -> None:
        self._engine = engine
        self._objects = objects
        self._waiting: weakref.WeakValueDictionary[int, SentFunction] = weakref.WeakValueDictionary()
        self._settings = settings.changing()  # those that the workers have, or get with a function
        self.sent: tuple[tuple[str, ...], str, dict[str, dict[str, Any]]] | None = None

    def add(self, function: SentFunction) -> int:
        """Take *function* up, to be distributed; returns its number."""
        number = self._engine.directory.number()
        self._waiting[number] = function
        self._engine.directory.watch(function, number)
        return number

    def distribute(self, only: Sequence[SentFunction] | None = None) -> None:
        """Send the functions that the workers do not have yet, all in one pickle, or *only* some.

        Raises: InvalidType for one that cannot be pickled; WorkerError if a worker cannot load them;
        UsageError if the working directory was deleted.
        """
        with self._engine.lock:
            self._engine.wait_until_ready()
            waiting = {n: f for n, f in sorted(self._waiting.items()) if only is None or f in only}
            if not waiting and not self.settings_changed():
                return
            path, folder = place.found()
            shown = self._engine.verbose and only is None
            say = status_line(shown)
            say("Synkro distributing functions...")
            start = time.monotonic()
            found = settings.collected()
            self.sent = path, folder, found
            totals = [len(waiting)] * self._engine.size
            bar = self.progress("distributing", totals, "function", Phase.LOADING, patience=_PATIENCE)
            with bar if shown else contextlib.nullcontext() as on_tick:
                self._objects.send(
                    waiting, lambda parcel: Distribute(parcel, path, folder, found), on_tick
                )
            self._settings = settings.changing()
            for number in waiting:
                self._waiting.pop(number, None)
            say(f"...distribution complete ({time.monotonic() - start:.2g} s).")

    @contextlib.contextmanager
    def progress(
        self,
        what: str,
        totals: Sequence[int],
        unit: str,
        *phases: Phase,
        patience: float = 0.0,
        lane: Lane | None = None,
    ) -> Iterator[Callable[[], None]]:
        """Show how far a command to *lane*, or to all, is; yields the ``on_tick`` to run it with.

        Rank r has ``totals[r]`` steps, and counts them in one of *phases*; a step is done when all ranks
        have done it.  See ``Progress``.
        """
        with Progress(what, max(totals), unit, patience) as progress:
            yield lambda: progress.reach(self._steps(totals, phases, lane or self._engine.everyone))
            progress.reach(max(totals))

    def _steps(self, totals: Sequence[int], phases: Sequence[Phase], lane: Lane) -> int:
        """How many steps all ranks have done; rank r has ``totals[r]``, and counts them in *phases*."""
        done, channel = max(totals), self._engine.channel
        waiting = lane.unanswered()
        if not waiting:  # some rank may have failed, which is known in a moment
            return 0
        for rank in waiting:
            phase, number = channel.whereabouts(rank)
            number = number if phase in phases else 0
            if number < totals[rank]:
                done = min(done, number)
        return done

    def bring(self, function: SentFunction) -> bool:
        """Make sure that the workers have *function*, and the settings of the libraries.

        Returns whether it was sent now.  Raises: as ``distribute``.
        """
        new = function.number in self._waiting
        if not new and not self.settings_changed():
            return False
        together = [function]
        if function.lane is not None:  # sent later, they would have to wait for its calls
            together += [each for each in self._waiting.values() if each.lane is not None]
        try:
            self.distribute(together)
        except InvalidType:
            self.distribute([function])
        return new

    def settings_changed(self) -> bool:
        """Whether the workers lack settings that the main process has changed."""
        return settings.changing() != self._settings


class SentFunction:
    """A function that the workers have, or are to have.

    Attributes:
        name: for messages.
        spec: what the workers know of it.
        number: its number there.
        roots: the objects that it brought along, which live on the workers as long as this.
        lane: that of the ranks which it runs on, if not all.
    """

    name: str
    spec: FunctionSpec
    number: int

    def __init__(self) -> None:
        self.roots: list[Known] = []
        self.lane: Lane | None = None
        self._watch: Watch | None = None

    def hold(self, roots: list[Known]) -> None:
        """Keep *roots* on the workers.

        They are held in here, as an object may hold a function of a method of its own: both go together.
        """
        self.roots = roots

    def _join(self, services: Services, spec: FunctionSpec) -> None:
        """Belong to a session, by its *services*, from now on, and be *spec* there."""
        self._distribution, self._objects = services.distribution, services.objects
        self.spec = spec
        self._watch = None
        self.number = services.distribution.add(self)

    def _bring(self, view: Snapshot | None = None) -> Sequence[Assigned]:
        """Make sure that the workers have the function, and what it uses as it is here, or in *view*.

        Returns the numbers and strings that the call is to bring.

        Raises: InvalidType for what cannot be pickled; InvalidValue for an object that has changed here
        and there; WorkerError if a worker cannot load it.
        """
        sent = self._distribution.bring(self)
        if self._watch is None:
            self._watch = self._objects.watch(self)
            if view is None and sent:
                return ()
            if view is None:  # it was sent before, by distribute(), and may use something else now
                self._watch = self._objects.renew(self, self._watch)
                return ()
        assigned = self._watch.assigned() if view is None else None
        if assigned is None:
            self._watch = self._objects.renew(self, self._watch, view)
        return assigned or ()


@dataclass(frozen=True)
class Services:
    """The parts of a session that functions use, and maps; made by the session."""

    engine: Engine
    outputs: Outputs
    variables: Variables
    objects: Objects
    distribution: Distribution
    background: Background
    replacement: Replacement
