"""The hosts of a program that mpiexec, or srun, has started as ``python -m synkro.hosts prog.py``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time

from ..errors import InvalidValue, SessionError
from ..machine import unlinked
from .pool import PATIENCE, MpiHosts
from .protocol import End

GATEWAY = "SYNKRO_GATEWAY"
"""The environment variable that tells a program on several hosts where its gateway listens."""

_PARTING = 10.0  # seconds in which all hosts have to end their workers


class Joined(MpiHosts):
    """A session with a gateway that is there before, and stays."""

    secret = False

    def __init__(self, seconds: float) -> None:
        """All hosts have to begin within *seconds*.

        Raises: InvalidValue if there is no gateway; SessionError if it cannot serve.
        """
        super().__init__(seconds)
        path = os.environ.get(GATEWAY, "")
        if not path:
            raise InvalidValue(
                'hosts="mpi", but no mpiexec has started this program on several hosts. Start it by '
                "mpiexec -n HOSTS -ppn 1 python -m synkro.hosts prog.py, or in a job of SLURM's by "
                "srun --ntasks-per-node=1 python -m synkro.hosts prog.py."
            )
        with contextlib.ExitStack() as undo, socket.socket(socket.AF_UNIX) as connected:
            try:
                self._held = unlinked(f"{path}-lock", os.O_RDWR | os.O_CREAT)
                undo.callback(os.close, self._held)
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                connected.connect(path)
            except BlockingIOError:
                raise SessionError(
                    'hosts="mpi" serves one session at a time, and this program has one: close() it '
                    "first."
                ) from None
            except OSError as error:
                raise SessionError(
                    f"the processes of MPI's have ended ({error}): start the program anew."
                ) from None
            self.sentinel: int = os.dup(connected.fileno())  # which hears when the gateway hangs up
            undo.callback(os.close, self.sentinel)
            self._meet(connected, undo)
            self.hosts: list[str] = [said.name for said in self.said]
            self.places: range = range(len(self.hosts))
            self._settle(undo)
        self._undo.callback(self._leave)

    def _await(self, fd: int) -> None:
        patience = self.left(PATIENCE)
        if not select.select([fd], [], [], patience)[0]:
            raise SessionError(f"the hosts did not answer within {round(patience, 1):g} s.")

    def last_words(self, patience: float = 0.0) -> str:
        return "mpiexec, or srun, says why on its stderr"

    def kill(self) -> None:
        """End the workers; the processes of MPI's go on."""
        with contextlib.suppress(OSError):
            self.gateway.send(End())

    def _leave(self) -> None:
        """Wait until the workers of all hosts have ended, and the gateway hangs up."""
        deadline = time.monotonic() + _PARTING
        with contextlib.suppress(OSError, EOFError):
            while self.gateway.poll(max(0.0, deadline - time.monotonic())):
                self.gateway.recv()
