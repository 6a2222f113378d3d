"""One process of MPI's on each host: started from the main process, which stays outside of MPI.

``reached`` says which way the hosts of ``fork(hosts=…, launcher=…)`` are reached, and reaches them.

::

    main process ── mpiexec ── launcher (ssh …) ──▶ process 1 on the second host
         │              └────────────────────────▶ process 0 on this host, the gateway
         └── socket, and a lifeline ───────────────────┘

All hosts are reached as by ssh: MPICH's mpiexec, or Open MPI's, calls an *agent*, a script of ours, with
the name of a host and a command, once for each of the others.  So also where srun starts them: any host
can be the first, and stands outside of the job if it has to, as when salloc leaves the program on the
login node.

mpiexec tells its environment to whoever comes first to its port.  So it gets a few variables only.  The
key of the session, and the environment, go to the other hosts on the launcher's standard input, and the
key to the gateway in a file that nobody else may read: they are in no command line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import A_LINE, InvalidType, InvalidValue, NotAvailable, SessionError, shown
from ..machine import python, readable_bytes, search_path, unlinked
from ..memory.keeper import SHM_FOLDER, Keeper
from .cleanup import HAS_ENDED, temporary
from .joined import Joined
from .names import Host, copies, named
from .pool import BEGINNING, PATIENCE, MpiHosts, listed, stranger
from .process import LINE, told

_LAST_WORDS = 2000  # characters of mpiexec's output that an error tells
_SAID = 1 << 20  # bytes of its end that are kept: it may be endless
_GRACE = 1.0  # seconds in which the processes can end by themselves
_ASKING = 10.0  # seconds that a host may take to say what is wrong with it
_LOOK = 0.2  # seconds between looks at what processes that begin have printed
_LACKS = re.compile(rb"(ModuleNotFound|Import)Error")
_FIRST = 2 / 3  # of the time that is left until then for MPI to begin
_kept: list[Path] = []  # logs of sessions that have failed, until one ends well
_THERE = "Synkro is there"
_ASKED = (
    "import os, sys, mpi4py, synkro.worker.loop; "
    f"free = os.statvfs({SHM_FOLDER!r}); "
    f"print({_THERE!r}, free.f_bavail * free.f_frsize, file=sys.stderr)"
)
_LITTLE = 1 << 24  # bytes of shared memory with which MPI may not begin
_NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_\w+|PYTHON[A-Z0-9]+|"
    r"(UCX|FI|HWLOC|MPICH|MPIR|OMPI_MCA|PRTE_MCA|PMIX_MCA)_\w+"
)
"""The variables that an interpreter needs to start, and those by which users set MPI up."""

_SHELLS_OWN = re.compile(r"_|IFS|ENV|PS\d|OPT\w+|E?UID|PPID|GROUPS|LINENO|SHELLOPTS|BASH\w*")
"""Variables that a shell may not be told."""

_PASSED = ("PYTHON", "UCX_", "FI_")  # what Open MPI does not pass on by itself

_AGENT = """#!/bin/sh
# Called as ssh is: starts a command on a host, which finds the lines of told on its standard input.
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$1
shift
. {folder}/environment
exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-  # mpiexec's port is among them, and has to close with it
(  # ends with the main process, see held
    read -r _ < /proc/$PPID/fd/3
    trap '' TERM
    kill 0
    sleep 1
    kill -9 0
) > /dev/null 2>&1 &
{reach}
"""
_HELD = 'exec 3<&0; exec "$@" < /dev/null'
_COMMAND = (
    "n=0; while IFS= read -r line; do "
    rf"export {LINE}\$n=\$line; n=\$((n+1)); done; unset n line; $*"
)
_SRUN = """\
export SLURM_OVERLAP=1 SLURM_MPI_TYPE=none SLURM_CPU_BIND=none  # which older ones do not know
unset SLURM_DISTRIBUTION SLURM_HOSTFILE SLURM_INPUTMODE
exec {launcher} --nodelist="$host" --nodes=1 --ntasks=1 --ntasks-per-node=1 """
_REACH = {  # by the name of the launcher
    "srun": _SRUN + f'sh -c "{_COMMAND}" < {{folder}}/told',
    "pbs_tmrsh": 'exec {launcher} "$host" sh -c "$*"',  # nothing on its standard input gets there
}
_SSH = f'exec {{launcher}} "$host" "{_COMMAND}" < {{folder}}/told'


def is_here(name: str) -> bool:
    """Whether a host's *name* is one of this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError, UnicodeError):  # no name of a host can be that long
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


class Launch(MpiHosts):
    """The processes of MPI's of one session, which are started for it, and end with it."""

    def __init__(self, hosts: Sequence[str], launcher: str = "ssh", seconds: float = BEGINNING) -> None:
        """Start the processes; *launcher* is "ssh", "slurm", or a program that is called as ssh is.  All
        has to begin within *seconds*.

        Raises: InvalidValue if there is no such program; NotAvailable if there is no MPI; SessionError
        for what is wrong with the hosts: all of it, each with its cure.
        """
        super().__init__(seconds)
        self.hosts: list[str]
        self.places: Sequence[int]
        self.hosts, self.places = gateway_first(hosts)
        self._mpiexec = found_mpiexec()
        self._launcher = launcher_of(launcher, os.environ)
        self.secret: bool = self._launcher.secret
        with contextlib.ExitStack() as undo:
            lifeline, self._held = os.pipe()
            try:
                folder = self._kept_folder(undo)
                self._log = undo.enter_context(open(Path(folder, "log"), "w+b"))
                self._copy: Path | None = None  # of the log, which stays
                undo.callback(self._settle_log)
                self._process = self._start(folder, lifeline, undo)
                self.sentinel: int = os.pidfd_open(self._process.pid)
                undo.callback(os.close, self.sentinel)
                self._meet(self._connected(folder), undo, [lifeline])
            finally:
                os.close(lifeline)
            self._settle(undo)

    @property
    def way(self) -> str:
        return f"{super().way} over {self._launcher.name}"

    def _kept_folder(self, undo: contextlib.ExitStack) -> str:
        """A new folder, which goes at the end of the session, or of this process."""
        folder = os.path.join(temporary(), f"synkro-{os.urandom(8).hex()}")
        undo.callback(os.close, self._held)
        self._keeper = Keeper()
        undo.callback(self._keeper.close)
        self._keeper.tell("folder", folder)
        os.mkdir(folder, 0o700)
        return folder

    def _start(self, folder: str, lifeline: int, undo: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        agent = os.path.join(folder, "launcher")
        for path, mode, text in (
            (os.path.join(folder, "told"), 0o600, told(os.urandom(32), self.environment)),
            (os.path.join(folder, "environment"), 0o600, exported(self.environment)),
            (agent, 0o700, self._launcher.agent(folder)),
        ):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(os.fsencode(text))
        environment = needed(self.environment) | self._mpiexec.environment(agent, folder)
        environment["PYTHONPATH"] = os.pathsep.join(search_path())
        secret = "secret" if self._launcher.secret else "agreed"
        program = [python(), "-m", "synkro.hosts.process", folder, str(len(self.hosts)), secret]
        process = subprocess.Popen(
            ["sh", "-c", _HELD, "sh", *self._mpiexec.command(self.hosts, agent, program, environment)],
            stdin=lifeline,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is the main process's
        )
        undo.callback(self._end)
        self._keeper.tell("group", process.pid)
        return process

    def _end(self) -> None:
        """Wait for mpiexec to end, for a moment; then end it, and what it has started here."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
                break
            os.killpg(self._process.pid, number)
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # the keeper was killed
            self._keeper.tell("group", 0)

    def release(self) -> None:
        super().release()
        self._keeper.disown()

    # ── the gateway ──────────────────────────────────────────────────────────────────────────────

    def _connected(self, folder: str) -> socket.socket:
        """The socket to the gateway."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(Path(folder, "gateway")))
            server.listen(1)
            self._await(server.fileno())
            return server.accept()[0]

    def _await(self, fd: int) -> None:
        patience = min(PATIENCE, _FIRST * self.left(BEGINNING))
        ready, wrong = self._ready(fd, patience)
        if fd in ready:
            return
        words = self.last_words()
        how = "mpiexec ended" if ready else f"MPI did not begin within {round(patience, 1):g} s"
        self.kill()  # it may go on and on
        if why := stranger(words):
            wrong = [f"{why}.{self.log()}"]
        wrong = wrong or self._asked_one_by_one()
        if not wrong:
            wrong = [
                f"{how}, and each host answers by itself: look at what stands between them (a firewall, "
                f"names that one of them does not know, somebody else who speaks to mpiexec's port)."
                f"{self.log()} The end of its output:\n{words}"
            ]
        raise SessionError(listed(wrong))

    def _ready(self, fd: int, patience: float) -> tuple[list[int], list[str]]:
        """Which of *fd* and the sentinel are readable within so many seconds.

        If a process has ended before that, which may lack a package, also what is wrong with the hosts:
        MPI waits for it.
        """
        until, asked = time.monotonic() + patience, False
        while True:
            left = until - time.monotonic()
            ready, _, _ = select.select([fd, self.sentinel], [], [], max(0.0, min(left, _LOOK)))
            if fd in ready or left <= 0:
                return ready, []
            said = self._said()
            ended = HAS_ENDED.search(said)
            if not asked and (ended or _LACKS.search(said)):
                asked = True
                if wrong := self._asked_one_by_one():
                    return [], wrong
            if ended:
                return [], [self._why_ended(ended[1].decode())]
            if ready:
                return ready, []

    def _why_ended(self, host: str) -> str:
        """What to say of a process that has begun, and ended before MPI had."""
        words = self.last_words(_GRACE)
        how = re.search(r"EXIT CODE: \d+", words)  # that of a signal, mostly
        return (
            f"the process of MPI's on {host} ended before MPI had begun{f' ({how[0]})' if how else ''}."
            f"{self.log()} The end of its output:\n{words}"
        )

    def last_words(self, patience: float = 0.0) -> str:
        """The end of what mpiexec has printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        return self._said().decode(errors="replace").strip()[-_LAST_WORDS:]

    def _said(self) -> bytes:
        """The end of all that mpiexec has printed until now, on behalf of all hosts."""
        log = self._log.fileno()
        return os.pread(log, _SAID, max(0, os.fstat(log).st_size - _SAID))

    def log(self) -> str:
        if self._copy is None and self._said():
            handle, path = tempfile.mkstemp(prefix="synkro-", suffix=".log")
            os.close(handle)
            self._copy = Path(path)
            self._write(self._copy)
        return f" The log of all hosts is {self._copy}." if self._copy else ""

    def _write(self, copy: Path) -> None:
        with open(copy, "wb", opener=unlinked) as file:
            file.write(self._said())

    def _settle_log(self) -> None:
        """At the end: complete the copy of the log; if there is none, all is well: remove older ones."""
        if self._copy is not None:
            self._write(self._copy)
            _kept.append(self._copy)
        while self._copy is None and _kept:
            _kept.pop().unlink(missing_ok=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    # ── what is wrong ────────────────────────────────────────────────────────────────────────────

    def _asked_one_by_one(self) -> list[str]:
        """What is wrong with each host, asked without MPI, all at the same time."""
        others = list(dict.fromkeys(name for name in self.hosts if not is_here(name)))
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            return [wrong for wrong in pool.map(self._asked, others) if wrong]

    def _asked(self, host: str) -> str:
        name, called = self._launcher.name, self._launcher.called
        paths = f"PYTHONPATH={os.pathsep.join(search_path())}"
        command = shlex.join(["env", paths, python(), "-c", _ASKED])
        patience = self.left(_ASKING)
        try:
            status, said = _outcome(self._launcher.command(host, command), patience)
        except OSError as error:
            raise InvalidValue(
                f"launcher={called!r} cannot be started ({error.strerror}): check that it is a program, "
                f"and the one that its first line names, #!, is there."
            ) from None
        if status is None:
            raise_it = "give start_timeout= more, or " if patience < _ASKING else ""
            return (
                f"{host} did not answer within {round(patience, 1):g} s: {raise_it}check that {called} "
                f"{host} works."
            )
        last = next(reversed(said.strip().splitlines()), f"it ended with {status}")
        if not status:
            return self._why_not_begun(host, said)
        if status in (126, 127):
            return f"{host} has no {python()}: install the same environment in the same place there."
        if "Error: " in last:
            return f"{host}: {last}: install the same packages there (pip install mpi4py mpich for MPI)."
        check = shlex.join(self._launcher.command(host, "true"))
        return (
            f"{host} cannot be reached by {name} ({last}): check its name, and that '{check}' works "
            f"without a question."
        )

    def _why_not_begun(self, host: str, said: str) -> str:
        """What is wrong with a host whose answer is no error."""
        called = self._launcher.called
        answer = re.search(rf"{_THERE} (\d+)", said)
        if answer is None and self._launcher.secret:  # else nobody hears what it says
            return (
                f"{called} ended without an error, and has started nothing on {host}: check that "
                f"'{called} {host} hostname' prints its name."
            )
        if answer is not None and int(answer[1]) < _LITTLE:
            return (
                f"{host} has {readable_bytes(int(answer[1]))} left in {SHM_FOLDER}, with which MPI may "
                f"not begin: remove what lies there, or make it larger."
            )
        return ""


def _outcome(command: Sequence[str], patience: float) -> tuple[int | None, str]:
    """The exit status of a command, or None if it takes longer; and the end of what is on its stderr."""
    with tempfile.TemporaryFile() as said:  # a pipe would be read as long as somebody writes
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=said, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        status = process.returncode
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        start = max(0, os.fstat(said.fileno()).st_size - _LAST_WORDS)
        return status, os.pread(said.fileno(), _LAST_WORDS, start).decode(errors="replace")


Check = Callable[[Sequence[Host]], None] | None


def reached(
    hosts: Any, launcher: Any, seconds: float = BEGINNING, check: Check = None
) -> tuple[MpiHosts, tuple[Host, ...]]:
    """The processes of MPI's on the hosts, which have to begin within *seconds*, and who these are.

    Hosts that are to be started are handed to *check* before.

    Raises: InvalidType, InvalidValue; NotAvailable; SessionError if they cannot work together.
    """
    if isinstance(launcher, os.PathLike):
        launcher = os.path.abspath(launcher)
    if launcher is not None and not isinstance(launcher, str):
        raise InvalidType(
            f"launcher= is 'ssh', 'slurm', or the path of a program that is called as ssh is; got "
            f"{shown(launcher, A_LINE)}."
        )
    if isinstance(hosts, str) and hosts == "mpi":
        if launcher is not None:
            raise InvalidValue(
                f'hosts="mpi" are there already, and launcher={shown(launcher, A_LINE)} would start '
                f"some: give one."
            )
        joined = Joined(seconds)
        return joined, tuple(map(Host, joined.hosts))
    if (count := copies(os.environ)) > 1:
        raise InvalidValue(
            f"mpiexec, or srun, has started {count} copies of this program, and with "
            f"hosts={shown(hosts)} each would start workers on all hosts. Start one copy; or the hosts "
            f"themselves, by mpiexec -n HOSTS -ppn 1 python -m synkro.hosts prog.py, and say "
            f'hosts="mpi".'
        )
    found = named(hosts, os.environ)
    if check is not None:
        check(found)
    names = [host.name for host in found]
    return Launch(names, best_launcher(hosts) if launcher is None else launcher, seconds), found


# ── mpiexec, and what it calls ───────────────────────────────────────────────────────────────────────


def needed(environment: Mapping[str, str]) -> dict[str, str]:
    """What mpiexec gets of *environment*: no secret, as anybody may ask it."""
    return {name: value for name, value in environment.items() if _NEEDED.fullmatch(name)}


def exported(environment: Mapping[str, str]) -> str:
    """The lines by which a shell takes *environment* over."""
    names = [name for name in environment if name.isidentifier() and name.isascii()]
    return "".join(
        f"export {name}={shlex.quote(environment[name])}\n"
        for name in names
        if not _SHELLS_OWN.fullmatch(name)
    )


class Launcher(NamedTuple):
    """A program that starts a command on another host.

    Attributes:
        path: where it is.
        called: what the user calls it.
    """

    path: str
    called: str

    @property
    def name(self) -> str:
        """What messages call the launcher."""
        return os.path.basename(self.path)

    @property
    def secret(self) -> bool:
        """Whether the launcher hands its standard input over, and so the key and the environment."""
        return self.name != "pbs_tmrsh"

    def agent(self, folder: str) -> str:
        """A script that mpiexec calls as ssh; in *folder* there are the files environment and told."""
        quoted = shlex.quote(folder)
        reach = _REACH.get(self.name, _SSH).format(launcher=shlex.quote(self.path), folder=quoted)
        return _AGENT.format(reach=reach, folder=quoted)

    def command(self, host: str, command: str) -> list[str]:
        """A command line that runs *command*, of a shell, on a host."""
        where, shell = [host], ["sh", "-c"] if self.name in _REACH else []
        if self.name == "srun":
            where = [f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
        return [self.path, *where, *shell, command]


def best_launcher(hosts: object) -> str:
    """What reaches the hosts of ``hosts=``, unless the user says something else."""
    if hosts == "slurm":
        return "slurm"
    return "pbs_tmrsh" if hosts == "pbs" and shutil.which("pbs_tmrsh") else "ssh"


def launcher_of(launcher: str, environment: Mapping[str, str]) -> Launcher:
    """What ``launcher=`` names: "ssh", "slurm", or a program.  Raises: InvalidValue."""
    program = "srun" if launcher == "slurm" else launcher
    found = shutil.which(program)
    if found is None and program == "srun":
        raise InvalidValue(
            "launcher='slurm' calls srun, which is not here: start the program on a node of the job, or "
            "give launcher='ssh'."
        )
    if found is None and os.path.exists(program):
        is_what = "a folder" if os.path.isdir(program) else "no program (chmod +x makes it one)"
        raise InvalidValue(
            f"launcher={shown(launcher, A_LINE)} is {is_what}: give 'ssh', 'slurm', or the path of a "
            f"program that is called as ssh is."
        )
    if found is None:
        raise InvalidValue(
            f"launcher={shown(launcher, A_LINE)}: there is no such program. Give 'ssh', 'slurm', or one "
            f"that is called as ssh is."
        )
    if os.path.basename(program) == "srun" and "SLURM_JOB_ID" not in environment:
        raise InvalidValue(
            "launcher='slurm' starts processes in a job of SLURM's, and SLURM_JOB_ID is not set: this "
            "is none. Start the program in one, by sbatch, salloc or srun; or give launcher='ssh'."
        )
    return Launcher(os.path.abspath(found), program)


class Mpiexec(NamedTuple):
    """The mpiexec that belongs to the MPI library, as far as one can see.

    Attributes:
        path: where it is.
        open_mpi: whether it is Open MPI's; else it is MPICH's, hydra.
    """

    path: str
    open_mpi: bool

    def command(
        self, hosts: Sequence[str], agent: str, program: Sequence[str], environment: Mapping[str, str]
    ) -> list[str]:
        """The command line that starts *program* once on each host, the first of which is this."""
        count = str(len(hosts))
        if not self.open_mpi:
            reach = ["-launcher", "ssh", "-launcher-exec", agent]
            where = ["-hosts", ",".join(hosts), "-n", count, "-ppn", "1", "-wdir", "/"]
            return [self.path, *reach, *where, "-prepend-pattern", "[%h] ", *program]
        passed = [each for name in environment if name.startswith(_PASSED) for each in ("-x", name)]
        where = ["--host", ",".join(f"{host}:1" for host in hosts), "-n", count, "--wdir", "/"]
        return [self.path, *where, "--map-by", "slot", "--bind-to", "none", *passed, *program]

    def environment(self, agent: str, folder: str) -> dict[str, str]:
        """What mpiexec has to find in its environment; files go to *folder*."""
        if not self.open_mpi:
            return {}
        settings = {"plm": "ssh", "plm_ssh_agent": agent, "plm_ssh_no_tree_spawn": "1"}
        settings |= {"ras": "^slurm,pbs,lsf,gridengine", "leave_session_attached": "1"}
        found = {f"PRTE_MCA_{name}": value for name, value in settings.items()}
        found["TMPDIR"] = folder
        if os.geteuid() == 0:
            found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return found


def found_mpiexec() -> Mpiexec:
    """Raises: NotAvailable."""
    beside = os.path.join(os.path.dirname(python()), "mpiexec")
    path = beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py" if path else "mpiexec"
        raise NotAvailable(f"hosts= needs MPI, and {missing} is not here: pip install mpi4py mpich.")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    says = done.stdout + done.stderr
    open_mpi = re.search(r"\(Open MPI\) (\d+)", says)
    if "HYDRA" not in says and (open_mpi is None or int(open_mpi[1]) < 5):
        first, *_ = says.strip().splitlines() or ["nothing"]
        raise NotAvailable(
            f"hosts= needs the mpiexec of MPICH, or of Open MPI 5 or later, and {path} is another one: "
            f"it says {shown(first)}. pip install mpich."
        )
    return Mpiexec(path, open_mpi is not None)
