"""How processes are started on hosts: MPICH's mpiexec and Open MPI's, over ssh, SLURM or PBS.

All of it goes the way of ssh: mpiexec calls an *agent*, a script of ours, with the name of a host and a
command, once for each of the others.  So also where srun starts them: any host can be the first, and
stands outside of the job if it has to, as when salloc leaves the program on the login node.

mpiexec tells its environment to whoever comes first to its port.  So it gets a few variables only, and
what it calls finds the rest in files of the session's folder.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import A_LINE, InvalidValue, NotAvailable, shown
from ..machine import python

LINE = "SYNKRO_LINE_"
"""How the environment variables begin by which processes on other hosts get the lines of ``told``."""

_NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_\w+|PYTHON[A-Z0-9]+|"
    r"(UCX|FI|HWLOC|MPICH|MPIR|OMPI_MCA|PRTE_MCA|PMIX_MCA)_\w+"
)
"""The variables that an interpreter needs to start, and those by which users set MPI up."""

_SHELLS_OWN = re.compile(r"_|IFS|ENV|PS\d|OPT\w+|E?UID|PPID|GROUPS|LINENO|SHELLOPTS|BASH\w*")
"""Variables that a shell may not be told."""

_LONGEST = 1 << 16  # bytes of a line: a variable has at most twice as many

_INHERITED = (  # by a program that mpiexec or srun has started: they would confuse ours
    *("PMI", "PMIX", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "OMPI_", "PRTE_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
_SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")  # a user's, which a launcher sets, too
_PASSED = ("PYTHON", "UCX_", "FI_")  # what Open MPI does not pass on by itself

_GREETED = "HYD_pmcd_pmiserv_proxy_init_cb"
"""What hydra names where it does not take a process for one of its own."""

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


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """*environment* without what mpiexec, or srun, has told this process alone."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS) or not name.startswith(_INHERITED)
    }


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


def told(key: bytes, environment: Mapping[str, str]) -> str:
    """The lines that processes on other hosts find on their standard input; ``heard`` reads them."""
    encoded = base64.b64encode(zlib.compress(json.dumps(dict(environment)).encode())).decode()
    pieces = [encoded[at : at + _LONGEST] for at in range(0, len(encoded), _LONGEST)]
    return "".join(f"{line}\n" for line in (key.hex(), *pieces))


def heard(lines: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """The key and the environment in lines that ``told`` has made."""
    key, *pieces = lines
    environment: dict[str, str] = json.loads(zlib.decompress(base64.b64decode("".join(pieces))))
    return bytes.fromhex(key), environment


def handed_over() -> list[str]:
    """The lines that the launcher has handed to this process, which it then forgets."""
    names = sorted((n for n in os.environ if n.startswith(LINE)), key=lambda n: int(n[len(LINE) :]))
    return [os.environ.pop(name) for name in names]


def held(command: Sequence[str]) -> list[str]:
    """*command*, with what is its standard input as descriptor 3."""
    return ["sh", "-c", _HELD, "sh", *command]


def stranger(words: str) -> str:
    """Who has ended MPICH's mpiexec, by its last *words*: empty if that was none but its own."""
    if _GREETED not in words:
        return ""
    return (
        "somebody who is none of its processes has connected to mpiexec's port, and has said what one "
        "says there (a replayed handshake), which ends mpiexec; look for who is on the network"
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
        self,
        hosts: Sequence[str],
        agent: str,
        program: Sequence[str],
        environment: Mapping[str, str],
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
