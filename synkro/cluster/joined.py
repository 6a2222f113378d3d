"""The hosts of a program that mpiexec, or srun, has started as ``python -m synkro.cluster prog.py``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import time

from ..errors import InvalidValue, SessionError
from .cluster import PATIENCE, Cluster
from .questions import End

GATEWAY = "SYNKRO_GATEWAY"
"""The environment variable that tells such a program where its gateway listens."""

_PARTING = 10.0  # seconds in which all hosts have to end their workers
_CREDENTIALS = struct.Struct("3i")


class Joined(Cluster):
    """A session with a gateway that is there before, and stays."""

    def __init__(self, seconds: float) -> None:
        """All has to begin within *seconds*.

        Raises: InvalidValue if there is none; SessionError if it cannot serve.
        """
        start = time.monotonic()
        self._until = start + seconds
        path = os.environ.get(GATEWAY, "")
        if not path:
            raise InvalidValue(
                'hosts="mpi", but no mpiexec has started this program on several hosts. Start it by '
                "mpiexec -n HOSTS -ppn 1 python -m synkro.cluster prog.py, or in a job of SLURM's by "
                "srun --ntasks-per-node=1 python -m synkro.cluster prog.py."
            )
        with contextlib.ExitStack() as undo, socket.socket(socket.AF_UNIX) as connected:
            self._lock = self._locked(f"{path}-lock", undo)
            try:
                connected.connect(path)
            except OSError as error:
                raise SessionError(
                    f"the processes of MPI's have ended ({error}): start the program anew."
                ) from None
            pid, *_ = _CREDENTIALS.unpack(
                connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            self.sentinel = os.pidfd_open(pid)
            undo.callback(os.close, self.sentinel)
            self._meet(connected, undo)
            self.hosts = [said.name for said in self.said]
            self.places = range(len(self.hosts))
            self._compare()
            undo.callback(self._leave)
            self._undo = undo.pop_all()
        self.seconds = time.monotonic() - start

    @staticmethod
    def _locked(path: str, undo: contextlib.ExitStack) -> int:
        """The gateway serves one session at a time."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SessionError(
                'hosts="mpi" serves one session at a time, and this program has one: close() it first.'
            ) from None
        except OSError as error:
            raise SessionError(
                f"the processes of MPI's have ended ({error}): start the program anew."
            ) from None
        return file

    def _await(self, fd: int) -> None:
        patience = self.left(PATIENCE)
        ready, _, _ = select.select([fd, self.sentinel], [], [], patience)
        if not ready:
            raise SessionError(f"the hosts did not answer within {round(patience, 1):g} s.")
        if fd not in ready:
            raise SessionError(f"the processes of MPI's have ended: {self.last_words()}")

    def last_words(self, patience: float = 0.0) -> str:
        return "mpiexec, or srun, says why on its stderr"

    def kill(self) -> None:
        """End the workers; the processes of MPI's go on."""
        with contextlib.suppress(OSError):
            self.gateway.send(End())

    def close(self) -> None:
        self._undo.close()

    def _leave(self) -> None:
        """Wait until the workers of all hosts have ended, and the gateway hangs up."""
        self.kill()
        deadline = time.monotonic() + _PARTING
        with contextlib.suppress(OSError, EOFError):
            while self.gateway.poll(max(0.0, deadline - time.monotonic())):
                self.gateway.recv()

    def release(self) -> None:
        super().release()
        os.close(self._lock)
