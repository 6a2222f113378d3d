"""Programs that treat processes in ways of their own: they ignore ends, change their user, fork."""

import os

import pytest

pytestmark = pytest.mark.programs

REAPERS = {
    "ignores SIGCHLD": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "waits for all": "signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))",
}
ENDS = {
    "exit": "os._exit(7)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "fault": "os.kill(os.getpid(), signal.SIGSEGV)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("reaper", REAPERS)
def test_the_end_of_a_worker_that_nobody_saw_is_not_made_up(run_python, reaper, end):
    run_python(
        f"""
import os, resource, signal, synkro as synk
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{REAPERS[reaper]}
synk.fork(2, devices="cpu", verbose=False)
try:
    synk.function(lambda: synk.rank() and {ENDS[end]}, outputs=None)()
except synk.WorkerDied as error:
    assert (error.rank, error.exitcode, error.signal) == (1, None, None)
    assert "ended (how is not known: this program, or what started it, ignores SIGCHLD" in str(error)
    assert "exit code" not in str(error)
synk.close()
assert synk.fork(2, devices="cpu", verbose=False) == 2
"""
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone changes its user")
@pytest.mark.parametrize("stuck", [False, True])
def test_a_program_that_has_changed_its_user_closes_quietly(run_python, stuck):
    done = run_python(
        f"""
import os, threading, time, synkro as synk
synk.fork(2, devices="cpu", verbose=False)
assert synk.function(lambda x: x.sum(), outputs="sum")([1.0, 2.0]) == 3
if {stuck}:
    synk.function(lambda: time.sleep(60), outputs=None).submit()
os.setuid(65534)
pids = synk.here.session.pids
synk.close()
assert not any(os.path.exists(f"/proc/{{pid}}") for pid in pids)
"""
    )
    assert done.stderr == ""
