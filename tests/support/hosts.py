"""Hosts made of namespaces of this machine: network, mounts, memory and names of their own.

::

    h1 ── 10.77.0.1 ─┐
    h2 ── 10.77.0.2 ─┼─ a bridge, in a network namespace of its own
    h3 ── 10.77.0.3 ─┘

They share the file system, but for /dev/shm, /run and /sys.  All goes with the processes that hold them.
A test tells its processes from those of others by their environment: its folder is their ``TMPDIR``.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from synkro.errors import NotAvailable
from synkro.hosts.launch import found_mpiexec

from .programs import ROOT
from .waiting import wait_until

try:
    MPIEXEC = found_mpiexec()
except NotAvailable:  # where the tests of several hosts are left out
    MPIEXEC = None
OPEN_MPI = MPIEXEC is not None and MPIEXEC.open_mpi

_SHELL = """#!/bin/sh
# Called as ssh is: [options] HOST COMMAND…
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$1
shift
if [ ! -f {folder}/"$host" ]; then
    echo "ssh: Could not resolve hostname $host: Name or service not known" >&2
    exit 255
fi
exec nsenter -t "$(cat {folder}/"$host")" -n -u -i -m -- \
    env -i PATH="$PATH" HOME="$HOME" STARTED_IN="$TMPDIR" sh -c "$*"
"""

_OWN = ["--net", "--uts", "--ipc", "--mount"]  # namespaces of a host
_HOLD = """
hostname {name}
mount --make-rprivate /
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mount -t sysfs sysfs /sys
mount --bind {folder}/names /etc/hosts
ip link set lo up
exec sleep infinity
"""


class Program(subprocess.Popen):
    """One that hears and says lines; it is killed at the end of its block."""

    def tell(self, line=""):
        print(line, file=self.stdin, flush=True)

    def hear(self):
        """What its next line says."""
        line = self.stdout.readline()
        assert line, "it says no more"
        return json.loads(line)

    def __exit__(self, *error):
        self.kill()
        super().__exit__(*error)


class Hosts:
    """Some of them, by name.

    Attributes:
        launcher: the path of a program that is called as ssh is, and reaches them.
    """

    def __init__(self, folder, names):
        self.folder = folder
        self.names = names
        self.launcher = folder / "shell"
        self._processes = {}

    def start(self):
        lines = ["127.0.0.1 localhost"]
        lines += [f"10.77.0.{number} {name}" for number, name in enumerate(self.names, 1)]
        (self.folder / "names").write_text("\n".join(lines) + "\n")
        self.launcher.write_text(_SHELL.format(folder=self.folder))
        self.launcher.chmod(0o700)
        switch = self._hold("switch", ["--net"], "exec sleep infinity")
        run(*switch, "ip", "link", "add", "bridge", "type", "bridge")
        run(*switch, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate(self.names, 1):
            inside = self._hold(name, _OWN, _HOLD.format(name=name, folder=self.folder))
            pids = {each: str(self._processes[each].pid) for each in (name, "switch")}
            run(*switch, "ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0",
                "netns", pids[name])  # fmt: skip
            run(*switch, "ip", "link", "set", f"to-{name}", "master", "bridge", "up")
            run(*inside, "ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            run(*inside, "ip", "link", "set", "eth0", "up")
            assert wait_until(lambda inside=inside: "10.77" in run(*inside, "cat", "/etc/hosts"))
            (self.folder / name).write_text(pids[name])

    def _hold(self, name, unshared, script):
        """A process in namespaces of its own; returns the command that enters them."""
        process = self._processes[name] = subprocess.Popen(
            ["unshare", *unshared, "sh", "-euc", script], start_new_session=True
        )
        own = f"/proc/{process.pid}/ns/net"
        here = os.readlink("/proc/self/ns/net")
        assert wait_until(lambda: os.readlink(own) != here or process.poll() is not None)
        assert process.poll() is None, f"no namespaces for {name}: are you root?"
        return ["nsenter", "-t", str(process.pid), *unshared, "--"]

    def shared_files(self):
        """What lies in /dev/shm on each, for those that have something there."""
        listed = {name: run(*self.on(name, "ls", "/dev/shm")).split() for name in self.names}
        return {name: files for name, files in listed.items() if files}

    def on(self, name, *command):
        """The command line that runs *command* on a host, with the environment of this process."""
        pid = str(self._processes[name].pid)
        return ["nsenter", "-t", pid, *_OWN, "--", "env", "-C", os.getcwd(), *map(str, command)]

    def begin(self, folder, *command, on="h1", stderr=None, **variables):
        """Start a program on a host, which imports from *folder*, too, and has its files there."""
        return Program(
            self.on(on, *command),
            env=environment(folder, variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def done(self, folder, *command, timeout=60, **variables):
        """What becomes of such a command on h1."""
        return subprocess.run(
            self.on("h1", *command),
            env=environment(folder, variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def python(self, folder, code, *arguments, **options):
        """… of a program of these lines."""
        return self.done(folder, sys.executable, "-B", "-c", code, *arguments, **options)

    @contextlib.contextmanager
    def cut_off(self, name):
        """A host is off the network until the end of the block."""
        link = self.on(name, "ip", "link", "set", "eth0")
        run(*link, "down")
        try:
            yield
        finally:
            run(*link, "up")

    @contextlib.contextmanager
    def mounted(self, name, *what):
        """*what* is mounted on a host until the end of the block: its last word says where."""
        run(*self.on(name, "mount", *what))
        try:
            yield
        finally:
            run(*self.on(name, "umount", what[-1]))

    @contextlib.contextmanager
    def switched(self, name, word, new):
        """Another switch stands before a host, and puts *new* in the place of *word*.

        Yields its process, which prints "changed" when it has.
        """
        program = [sys.executable, Path(__file__).with_name("switch.py")]
        for each in self.names:
            run(*self.on(each, *program, "whole", "eth0"))
        inside = ["nsenter", "-t", str(self._processes["switch"].pid), "--net", "--"]
        run(*inside, "ip", "link", "add", "out", "type", "veth", "peer", "name", "in")
        for each in ("out", "in"):
            run(*inside, "ip", "link", "set", each, "up")
        run(*inside, "ip", "link", "set", "in", "master", "bridge")
        run(*inside, "ip", "link", "set", f"to-{name}", "nomaster")
        switch = subprocess.Popen(
            [*inside, *program, f"to-{name}", "out", word, new], stdout=subprocess.PIPE, text=True
        )
        try:
            assert switch.stdout.readline() == "begun\n"
            yield switch
        finally:
            switch.kill()
            switch.communicate()
            run(*inside, "ip", "link", "delete", "out")
            run(*inside, "ip", "link", "set", f"to-{name}", "master", "bridge")

    def stop(self):
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder)


def environment(folder, variables):
    """That of programs which have their files in a *folder*."""
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TMPDIR": str(folder), **variables}


_TAP = """
import os, pickle, socket, sys
ours = {{"synkro.hosts.process", "synkro.hosts"}}.intersection(sys.orig_argv)
if ours and socket.gethostname() in {names}:
    from synkro.hosts import cleanup

    class Tap:
        def __init__(self, comm):
            self.comm = comm
            self.begin()

        def __getattr__(self, name):
            return getattr(self.comm, name)

{lines}

    def watched(*arguments, watch=cleanup.watch, **options):
        global wire
        held = watch(*arguments, **options)
        from synkro.hosts import wire

        def begin(self, *given, begin=wire.Wire.__init__):
            begin(self, *given)
            self._comm = Tapped(self._comm)

        wire.Wire.__init__ = begin
        return held

    cleanup.watch = watched
"""


def tap(folder, names, lines):
    """What processes of MPI's send from hosts of these *names* goes by the ``Tapped`` of *lines*."""
    text = _TAP.format(names=names, lines=textwrap.indent(lines, "    "))
    (folder / "sitecustomize.py").write_text(text)


def processes_of(folder):
    """The processes, on all hosts, that programs have started whose TMPDIR is *folder*, and these."""
    mark, found = f"={folder}\0".encode(), set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes():
                found.add(int(environment.parent.name))
    return found


def run(*command):
    """What it has printed; its failure is the test's."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
