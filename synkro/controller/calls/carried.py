"""``Carried``: a function on its way to the workers, with all that it uses."""

from __future__ import annotations

from collections.abc import Sequence

from ...ipc.channel import Lane
from ...messages import FunctionSpec
from ..objects.glances import Assigned
from ..objects.walk import Known, Look
from ..objects.watch import Watch
from .distribution import Functions


class Carried:
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

    def _join(self, home: Functions, spec: FunctionSpec) -> None:
        """Belong to the session of *home* from now on, and be *spec* there."""
        self._home = home
        self.spec = spec
        self._watch = None
        self.number = home.add(self)

    def _bring(self, view: Look | None = None) -> Sequence[Assigned]:
        """Make sure that the workers have the function, and what it uses as it is here, or in *view*.

        Returns the numbers and strings that the call is to bring.

        Raises: InvalidType for what cannot be pickled; InvalidValue for an object that has changed here
        and there; WorkerError if a worker cannot load it.
        """
        sent = self._home.bring(self)
        if self._watch is None:
            self._watch = self._home.objects.watch(self)
            if view is None and sent:
                return ()
            if view is None:  # it was sent before, by distribute(), and may use something else now
                self._watch = self._home.objects.renew(self, self._watch)
                return ()
        assigned = self._watch.assigned() if view is None else None
        if assigned is None:
            self._watch = self._home.objects.renew(self, self._watch, view)
        return assigned or ()
