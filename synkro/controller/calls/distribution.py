"""The functions of a session, and how they get to the workers."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import SessionClosed
from ...messages import Distribute, Phase
from ...packing import place, settings
from ..engine.engine import Engine
from ..objects.objects import Objects
from ..progress import Progress, status_line
from ..results.transfer import Outputs
from ..variables.registry import Variables

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

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
        self._executor: ThreadPoolExecutor | None = None
        self._settings: tuple[Any, ...] = ()  # those that the workers have

    def add(self, function: Carried) -> int:
        """Take *function* up, to be distributed; returns its number."""
        number = self.engine.directory.number()
        self._waiting[number] = function
        self.engine.directory.watch(function, number)
        return number

    def distribute(self, only: Carried | None = None) -> None:
        """Send the functions that the workers do not have yet, all in one pickle, or *only* one.

        Raises: InvalidType for one that cannot be pickled; WorkerError if a worker cannot load them;
        UsageError if the working directory was deleted.
        """
        with self.engine.lock:
            self.engine.require_ready()
            waiting = {n: f for n, f in sorted(self._waiting.items()) if only is None or f is only}
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
        self, what: str, totals: Sequence[int], unit: str, *phases: Phase, patience: float = 0.0
    ) -> Iterator[Callable[[], None]]:
        """Show how far the command in the block is; yields the ``on_tick`` to run it with.

        Rank r has ``totals[r]`` steps, and counts them in one of *phases*; a step is done when all ranks
        have done it.  See ``Progress``.
        """
        with Progress(what, max(totals), unit, patience) as progress:
            yield lambda: progress.reach(self._steps(totals, phases))
            progress.reach(max(totals))

    def _steps(self, totals: Sequence[int], phases: Sequence[Phase]) -> int:
        """How many steps all ranks have done; rank r has ``totals[r]``, and counts them in *phases*."""
        done, channel = max(totals), self.engine.channel
        waiting = channel.unanswered()
        if not waiting:  # some rank may have failed, which is known in a moment
            return 0
        for rank in waiting:
            phase, number = channel.whereabouts(rank)
            number = number if phase in phases else 0
            if number < totals[rank]:
                done = min(done, number)
        return done

    def bring(self, function: Carried) -> None:
        """Make sure that the workers have *function*, and the settings of the libraries.

        Raises: as ``distribute``.
        """
        if function.number in self._waiting or self.settings_changed():
            self.distribute(function)

    def settings_changed(self) -> bool:
        """Whether the workers lack settings that the main process has changed."""
        return settings.changing() != self._settings

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run *call* in the background, after those submitted before it."""
        self.engine.require_ready()
        if self._executor is None:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  no worker needs it

            self._executor = ThreadPoolExecutor(1, thread_name_prefix="synkro-submit")
        try:
            return self._executor.submit(call)
        except RuntimeError:
            raise SessionClosed(
                "this session, or the program, is ending: no call can be submitted."
            ) from None

    def cancel(self) -> None:
        """Cancel the submitted calls that have not begun."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Give memory back."""
        self.objects.close()
        self.outputs.close()
        self.variables.collectives.close()
