"""One process of MPI's on each host: started from the main process, which stays outside of MPI.

::

    main process ── mpiexec ── launcher (ssh …) ──▶ process 1 on the second host
         │              └────────────────────────▶ process 0 on this host, the gateway
         └── socket, and a lifeline ───────────────────┘

The key of the session goes to the other hosts on the launcher's standard input, and to the gateway in a
file that nobody else may read: it is in no command line and no environment of mpiexec's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import InvalidValue, NotAvailable, SessionError
from ..machine import search_path
from .hello import Hello, differences
from .questions import End

KEY = "SYNKRO_KEY"
"""The environment variable by which processes on other hosts get the key."""

_PATIENCE = 20.0  # seconds until all processes have begun MPI
_LAST_WORDS = 2000  # characters of mpiexec's output that an error tells
_GRACE = 1.0  # seconds in which the processes can end by themselves
_ASKING = 10.0  # seconds that a host may take to say what is wrong with it
_INHERITED = (  # by a program that mpiexec or srun has started: they would confuse ours
    *("PMI", "PMIX", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "OMPI_", "PRTE_"),
    *("SLURM_PROCID", "SLURM_LOCALID"),
)

_SSH = """#!/bin/sh
# Called as ssh is: hands the key over on the standard input of the real launcher.
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$1
shift
exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-  # mpiexec's port is among them, and has to close with it
exec {launcher} "$host" "IFS= read -r {key}; export {key}; exec $*" < {folder}/key
"""

_ASKED = "import synkro, numpy, cloudpickle, mpi4py"


def is_here(name: str) -> bool:
    """Whether a host's *name* is one of this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.bind(address)  # which only an address of this machine allows
                return True
    return False


def gateway_first(names: Sequence[str]) -> tuple[list[str], list[int]]:
    """*names*, with one of this machine in front, which is added if there is none.

    It is one by which the others can find this machine.  Also returns where each name is then.
    """
    here = next((place for place, name in enumerate(names) if is_here(name)), None)
    order = [place for place in range(len(names)) if place != here]
    others = [names[place] for place in order]
    places = [0 if place == here else 1 + order.index(place) for place in range(len(names))]
    if here is None or (names[here] == "localhost" and not all(map(is_here, others))):
        return [socket.gethostname(), *others], places
    return [names[here], *others], places


class Launch:
    """The processes of MPI's, one on each of *hosts*, and the socket to the gateway.

    Attributes:
        hosts: those of the processes; the first is this machine.
        places: which of them each is that was asked for.
        said: what each has said of itself.
        seconds: how long it took until all were there.
        gateway: the connection to the gateway.
        printed: the one by which it tells what workers print.
        descriptors: the socket by which it gets descriptors.
        sentinel: a descriptor that becomes readable when mpiexec ends.
    """

    def __init__(self, hosts: Sequence[str], launcher: str = "ssh") -> None:
        """Start them; *launcher* is a program that is called as ssh is.

        Raises: NotAvailable if there is no MPI; SessionError for what is wrong with the hosts: all of
        it, each with its cure.
        """
        start = time.monotonic()
        self.hosts, self.places = gateway_first(hosts)
        mpiexec = _mpiexec()
        self._launcher = _found(launcher)
        with contextlib.ExitStack() as undo:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="synkro-"))  # of mode 0700
            self._log = undo.enter_context(open(Path(folder, "log"), "w+b"))
            lifeline, self._lifeline = os.pipe()
            undo.callback(os.close, self._lifeline)
            printed, theirs = (Connection(each.detach()) for each in socket.socketpair())
            self.descriptors, received = socket.socketpair()
            self.printed = undo.enter_context(printed)
            undo.enter_context(self.descriptors)
            try:
                self._process = self._start(mpiexec, folder, undo)
                self.sentinel = os.pidfd_open(self._process.pid)
                undo.callback(os.close, self.sentinel)
                self.gateway = undo.enter_context(
                    self._connected(folder, [lifeline, theirs.fileno(), received.fileno()])
                )
            finally:
                os.close(lifeline)
                theirs.close()
                received.close()
            self.said: list[Hello] = self._hear()
            wrong = differences(self.hosts, self.said, os.getcwd())
            if wrong:
                raise SessionError(_listed(wrong))
            self._undo = undo.pop_all()
        self.seconds = time.monotonic() - start

    @property
    def way(self) -> str:
        """How the hosts talk and were reached, in words."""
        return f"{self.said[0].versions['MPI']} over {os.path.basename(self._launcher)}"

    def _start(self, mpiexec: str, folder: str, undo: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        key, agent = Path(folder, "key"), Path(folder, "launcher")
        key.write_text(os.urandom(32).hex() + "\n")
        key.chmod(0o600)
        agent.write_text(_SSH.format(launcher=shlex.quote(self._launcher), key=KEY, folder=folder))
        agent.chmod(0o700)
        environment = {n: v for n, v in os.environ.items() if not n.startswith(_INHERITED)}
        environment["PYTHONPATH"] = os.pathsep.join(search_path())
        process = subprocess.Popen(
            [
                *(mpiexec, "-launcher", "ssh", "-launcher-exec", str(agent)),
                *("-hosts", ",".join(self.hosts), "-n", str(len(self.hosts)), "-ppn", "1"),
                *("-wdir", "/", sys.executable, "-m", "synkro.cluster", folder, os.getcwd()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is the main process's
        )
        undo.callback(self._end)
        return process

    def _end(self) -> None:
        """Wait for mpiexec to end, for a moment; then end it, and what it has started here."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
                break
            os.killpg(self._process.pid, number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    # ── the gateway ──────────────────────────────────────────────────────────────────────────────

    def _connected(self, folder: str, ends: Sequence[int]) -> Connection:
        """The connection to the gateway, which gets its *ends* of the lifeline and of the sockets."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(Path(folder, "gateway")))
            server.listen(1)
            self._await(server.fileno())
            gateway, _ = server.accept()
        socket.send_fds(gateway, [b"ends"], ends)
        return Connection(gateway.detach())

    def _hear(self) -> list[Hello]:
        self._await(self.gateway.fileno())
        said: list[Hello] = self.gateway.recv()
        return said

    def _await(self, fd: int) -> None:
        """Wait until *fd* is readable.  Raises: SessionError if mpiexec ends, or it takes too long."""
        ready, _, _ = select.select([fd, self.sentinel], [], [], _PATIENCE)
        if fd in ready:
            return
        words = self.last_words()
        how = "mpiexec ended" if ready else f"MPI did not begin within {_PATIENCE:g} s"
        wrong = self._asked_one_by_one() or [
            f"{how}, and each host answers by itself: look at what stands between them (a firewall, "
            f"names that one of them does not know). The end of its output:\n{words}"
        ]
        raise SessionError(_listed(wrong))

    def last_words(self, patience: float = 0.0) -> str:
        """The end of what mpiexec has printed, after waiting *patience* seconds for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-_LAST_WORDS:]

    def ask(self, question: Any) -> Any:
        """The gateway's answer.

        Raises: TimeoutError; EOFError if the processes have ended.
        """
        self.gateway.send(question)
        if not self.gateway.poll(_PATIENCE):
            raise TimeoutError
        return self.gateway.recv()

    def close(self) -> None:
        """End the processes, and give everything back."""
        with contextlib.suppress(OSError):
            self.gateway.send(End())
        self._undo.close()

    def kill(self) -> None:
        """End them at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def release(self) -> None:
        """In a fork of the main process: the processes are the parent's; let go of their lifeline."""
        self._undo.pop_all()
        os.close(self._lifeline)
        os.close(self.sentinel)
        for connection in (self.gateway, self.printed, self.descriptors):
            connection.close()

    # ── what is wrong ────────────────────────────────────────────────────────────────────────────

    def _asked_one_by_one(self) -> list[str]:
        """What is wrong with each host, asked without MPI, all at the same time."""
        others = list(dict.fromkeys(name for name in self.hosts if not is_here(name)))
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            return [wrong for wrong in pool.map(self._asked, others) if wrong]

    def _asked(self, host: str) -> str:
        check = f"that '{self._launcher} {host} true' works without a question"
        paths = f"PYTHONPATH={os.pathsep.join(search_path())}"
        command = shlex.join(["env", paths, sys.executable, "-c", _ASKED])
        try:
            done = subprocess.run(
                [self._launcher, host, command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ASKING,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return (
                f"{host} did not answer within {_ASKING:g} s: check that {self._launcher} {host} works."
            )
        last = next(reversed(done.stderr.strip().splitlines()), f"it ended with {done.returncode}")
        if not done.returncode:
            return ""
        if done.returncode in (126, 127):
            return (
                f"{host} has no {sys.executable}: install the same environment in the same place there."
            )
        if "Error: " in last:
            return f"{host}: {last}: install the same packages there (pip install mpi4py mpich for MPI)."
        return (
            f"{host} cannot be reached by {os.path.basename(self._launcher)} ({last}): check its name, "
            f"and {check}."
        )


def _mpiexec() -> str:
    """Raises: NotAvailable."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py" if found else "mpiexec"
        raise NotAvailable(f"hosts= needs MPI, and {missing} is not here: pip install mpi4py mpich.")
    return found


def _found(launcher: str) -> str:
    """Raises: InvalidValue."""
    found = shutil.which(launcher)
    if found is None:
        raise InvalidValue(
            f"launcher={launcher!r}: there is no such program. Give 'ssh', or one that is called so."
        )
    return os.path.abspath(found)


def _listed(wrong: Sequence[str]) -> str:
    return "\n".join(["the hosts cannot work together:", *(f"- {each}" for each in wrong)])
