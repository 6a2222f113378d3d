"""Stand-ins for SLURM's srun and for PBS's pbs_tmrsh, which start processes on hosts of ``hosts``.

As the real ones they work in a job only, and on its nodes.  srun hands its environment and its standard
input to the tasks; pbs_tmrsh hands neither over, and runs its arguments without a shell.
"""

import sys

from support.programs import ROOT

_SRUN = """#!{python}
import argparse, os, signal, subprocess, sys
sys.path.insert(0, {root!r})
from synkro.hosts.names import expanded

parser = argparse.ArgumentParser()
for name in ("nodelist", "nodes", "ntasks", "ntasks-per-node"):
    parser.add_argument("--" + name)
parser.add_argument("--mpi", default=os.environ.get("SLURM_MPI_TYPE", "pmi2"))
parser.add_argument("--overlap", action="store_true")
parser.add_argument("command", nargs=argparse.REMAINDER)
options = parser.parse_args()
if "SLURM_JOB_ID" not in os.environ:
    sys.exit("srun: error: this stand-in allocates no jobs")
nodes = expanded(os.environ["SLURM_JOB_NODELIST"])
chosen = expanded(options.nodelist) if options.nodelist else nodes
if wrong := set(chosen) - set(nodes):
    sys.exit(f"srun: error: Unable to create step for job 7: Requested node {{wrong}} not in this job")
if options.nodelist and not os.environ.get("SLURM_OVERLAP"):
    sys.exit("srun: error: the step would wait for the one that runs")
step = dict(SLURM_STEP_NUM_TASKS=str(len(chosen)), SLURM_NTASKS=str(len(chosen)))
if options.mpi != "none":
    task = ["sh", "-c", 'export SLURM_PROCID=$PMI_RANK; exec "$@"', "sh", *options.command]
    reach = ["-launcher", "ssh", "-launcher-exec", {shell!r}]
    where = ["-hosts", ",".join(chosen), "-n", str(len(chosen)), "-ppn", "1"]
    mpiexec = os.path.join(os.path.dirname({python!r}), "mpiexec")
    os.execve(mpiexec, [mpiexec, *reach, *where, *task], {{**os.environ, **step}})
tasks = [
    subprocess.Popen(
        ["nsenter", "-t", open(f"{folder}/{{node}}").read(), *{own}, "--", *options.command],
        env={{**os.environ, **step, "SLURM_PROCID": str(number)}},
        start_new_session=True,
    )
    for number, node in enumerate(chosen)
]
signal.signal(signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGTERM) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""

_TMRSH = """#!{python}
import os, sys
host, *command = sys.argv[1:]
if "PBS_JOBID" not in os.environ or "PBS_ENVIRONMENT" not in os.environ:
    sys.exit("pbs_tmrsh: not executing under PBS")
if host not in open(os.environ["PBS_NODEFILE"]).read().split():
    sys.exit(f'pbs_tmrsh: host "{{host}}" is not a node in job')
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
enter = ["nsenter", "-t", open(f"{folder}/{{host}}").read(), *{own}, "--"]
os.execve("/usr/bin/nsenter", [*enter, *command], {{"PATH": "/usr/bin:/bin", "HOME": "/root"}})
"""


def slurm(hosts, folder, nodes="h[1-3]"):
    """The environment of a job of SLURM's, with srun in a *folder* on its PATH."""
    _write(hosts, folder / "srun", _SRUN)
    return {"PATH": _path(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes}


def pbs(hosts, folder, nodes=("h1", "h2", "h2"), tmrsh=True):
    """The environment of a job of PBS's, with pbs_tmrsh on its PATH or without."""
    if tmrsh:
        _write(hosts, folder / "pbs_tmrsh", _TMRSH)
    else:
        (folder / "ssh").symlink_to(hosts.launcher)
    (folder / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    job = {"PBS_JOBID": "7.server", "PBS_ENVIRONMENT": "PBS_BATCH"}
    return {"PATH": _path(folder), "PBS_NODEFILE": str(folder / "nodes"), **job}


def _path(folder):
    return f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin"


def _write(hosts, path, text):
    own = ["-n", "-u", "-i", "-m"]
    facts = {"root": str(ROOT), "shell": str(hosts.launcher), "folder": hosts.folder, "own": own}
    path.write_text(text.format(python=sys.executable, **facts))
    path.chmod(0o700)
