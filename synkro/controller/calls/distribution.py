"""The functions of a session, and how they get to the workers."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidType
from ...ipc.channel import Lane
from ...messages import Distribute, Phase
from ...packing import place, settings
from ...values.foreign import is_future
from ..engine.engine import Engine
from ..objects.objects import Objects
from ..progress import Progress, status_line
from ..results.transfer import Outputs
from ..variables.registry import Variables
from .submitted import Submitted, result_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .carried import Carried

_PATIENCE = 2.0  # seconds before a distribution shows how far it is


class Functions:
    """The functions of a session, and how they get to the workers."""

    def __init__(self, engine: Engine, outputs: Outputs, variables: Variables) -> None:
        self.engine = engine
        self.outputs = outputs
        self.variables = variables
        self.objects = Objects(engine, variables.collectives.master_rank)
        self._waiting: weakref.WeakValueDictionary[int, Carried] = weakref.WeakValueDictionary()
        self._submitted = Submitted()
        self._settings: tuple[Any, ...] = ()  # those that the workers have

    def add(self, function: Carried) -> int:
        """Take *function* up, to be distributed; returns its number."""
        number = self.engine.directory.number()
        self._waiting[number] = function
        self.engine.directory.watch(function, number)
        return number

    def distribute(self, only: Sequence[Carried] | None = None) -> None:
        """Send the functions that the workers do not have yet, all in one pickle, or *only* some.

        Raises: InvalidType for one that cannot be pickled; WorkerError if a worker cannot load them;
        UsageError if the working directory was deleted.
        """
        with self.engine.lock:
            self.engine.turns.land()
            self.engine.require_ready()
            waiting = {n: f for n, f in sorted(self._waiting.items()) if only is None or f in only}
            if not waiting and not self.settings_changed():
                return
            path, folder = place.found()
            shown = self.engine.verbose and only is None
            say = status_line(shown)
            say("Synkro distributing functions...")
            start = time.monotonic()
            found = settings.collected()
            totals = [len(waiting)] * self.engine.size
            bar = self.progress("distributing", totals, "function", Phase.LOADING, patience=_PATIENCE)
            with bar if shown else contextlib.nullcontext() as on_tick:
                self.objects.send(
                    waiting, lambda parcel: Distribute(path, folder, found, parcel), on_tick
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
            yield lambda: progress.reach(self._steps(totals, phases, lane or self.engine.everyone))
            progress.reach(max(totals))

    def _steps(self, totals: Sequence[int], phases: Sequence[Phase], lane: Lane) -> int:
        """How many steps all ranks have done; rank r has ``totals[r]``, and counts them in *phases*."""
        done, channel = max(totals), self.engine.channel
        waiting = lane.unanswered()
        if not waiting:  # some rank may have failed, which is known in a moment
            return 0
        for rank in waiting:
            phase, number = channel.whereabouts(rank)
            number = number if phase in phases else 0
            if number < totals[rank]:
                done = min(done, number)
        return done

    def bring(self, function: Carried) -> bool:
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

    def submit(self, ranks: tuple[int, ...], call: Callable[[], Any]) -> Future[Any]:
        """Run *call* in the background, after those submitted before it that use one of its *ranks*."""
        self.engine.require_ready()
        return self._submitted.submit(ranks, call)

    @functools.wraps(Variables.transfer)
    def transfer(self, value: Any, target: str | int | None) -> Any:
        if not is_future(value):
            return self.variables.transfer(value, target)
        ranks = self._submitted.ranks(value)
        if target != "cpu":
            to = self.variables.targets.ranks(target) or (self.variables.collectives.master_rank,)
            ranks = tuple(sorted({*ranks, *to}))
        return self.submit(
            ranks, lambda: self.variables.transfer(result_of(value, "transfer()"), target)
        )

    def await_submitted(self) -> None:
        """Wait until all submitted calls are over."""
        self._submitted.await_all()

    def cancel(self) -> None:
        """Cancel the submitted calls that have not begun."""
        self._submitted.cancel()

    def close(self) -> None:
        """Give memory back."""
        self.objects.close()
        self.outputs.close()
        self.variables.collectives.close()
