"""What happens when a rank does not do in NCCL what it has agreed to: nobody waits for ever.

The ranks have voted by then, so only faults are left that no test can make on real hardware: here a
rank's communicator is told to swallow an operation, to fail, or to report an error.
"""

import contextlib
import gc
import time
from unittest import mock

import numpy as np
import pytest

import synkro as synk
from support.gpus import pools, settled, started
from support.waiting import Watch


def session_of(pool):
    """A session of that pool, for a fixture."""
    with settled(pool) as devices, started(pool, devices) as session:
        session.function(lambda: __import__("cupy.cuda.nccl"), outputs=[])()
        yield session


@pytest.fixture(scope="module", params=pools("two")[1:])
def pair(request):
    yield from session_of(request.param)


@pytest.fixture(params=pools("two")[1:])
def own(request):
    """A session that the test may break."""
    yield from session_of(request.param)


def ones():
    return synk.all_reduce(synk.xp().ones(5), op="sum")


def works(session):
    return session.function(lambda: ones().get(), outputs=None)()[1].tolist() == [2.0] * 5


def links():
    """This rank's ends of all links that live."""
    from synkro.comms.nccl import Link

    return [link for link in gc.get_objects() if type(link) is Link and link.alive]


def lose():
    """Give all links up, on this rank."""
    for link in links():
        link.abort()


@contextlib.contextmanager
def doctored(**methods):
    """On rank 1, NCCL does as these *methods* do in the place of its own."""
    from cupy.cuda.nccl import NcclCommunicator

    if synk.rank() != 1:
        yield
        return
    with mock.patch.multiple(NcclCommunicator, **methods):
        yield


def give_up(*_):
    raise synk.CollectiveError("no more sockets")


def spoilt(patience, what):
    """Rank 1's next reduction goes wrong by *what*, with so many seconds of *patience* everywhere."""

    def run():
        from cupy.cuda import nccl, runtime

        from synkro.comms import nccl as watched

        all_reduce = nccl.NcclCommunicator.allReduce
        status = {"reports": 1, "reports what has no name": 7}.get(what)
        reduced = False

        def spoil(comm, *arguments):
            nonlocal reduced
            if what in ("reports", "raises in its middle", "faults", "is told nothing of"):
                all_reduce(comm, *arguments)
            reduced = True
            if what.startswith("raises"):
                raise ValueError("not today")
            if what == "refuses":
                raise nccl.NcclError(5)
            if what == "faults":
                runtime.fault("cudaErrorIllegalAddress")
            if what == "is told nothing of":
                raise runtime.CUDARuntimeError(1)

        def check(comm):
            if reduced:
                raise nccl.NcclError(status)

        checks = {} if status is None else {"check_async_error": check}
        before, watched.PATIENCE = watched.PATIENCE, patience
        try:
            with doctored(allReduce=spoil, **checks):
                return ones()
        finally:
            watched.PATIENCE = before

    return run


FAILED = "rank 1 failed .*"


@pytest.mark.parametrize(
    ("what", "patience", "says"),
    [
        (
            "swallows",
            1.0,
            r"all_reduce \(collective 1 of this call\): not complete after 1 s, though all",
        ),
        ("raises", 60.0, f"{FAILED} ValueError: not today"),
        ("raises in its middle", 60.0, f"{FAILED} ValueError: not today"),
        ("refuses", 60.0, f"{FAILED}NCCL reports NCCL_ERROR_INVALID_USAGE"),
        ("reports", 60.0, f"{FAILED}NCCL reports NCCL_ERROR_UNHANDLED_CUDA_ERROR"),
        (
            "reports what has no name",
            60.0,
            f"{FAILED}NCCL reports status 7, for which CuPy has no name",
        ),
    ],
)
def test_an_operation_that_goes_wrong_is_told_and_aborted(pair, what, patience, says):
    assert works(pair)
    with Watch(), pytest.raises(synk.WorkerError, match=says) as caught:
        pair.function(spoilt(patience, what), outputs=[])()
    assert what != "swallows" or isinstance(caught.value.original, synk.CollectiveError)
    assert works(pair)


@pytest.mark.parametrize(
    ("what", "named"),
    [("faults", "cudaErrorIllegalAddress"), ("is told nothing of", "cudaErrorInvalidValue")],
)
def test_an_error_of_cuda_ends_the_worker_at_once(own, what, named):
    """After it an abort, and waiting for the GPU, may take for ever."""
    works(own)
    with Watch(), pytest.raises(synk.WorkerDied, match=rf"all_reduce .*: {named}") as caught:
        own.function(spoilt(60.0, what), outputs=[])()
    assert caught.value.rank == 1


def stuck(patience, what):
    """Rank 1 does not come to an exchange, which connects its ranks in C when they first meet there."""

    def run():
        from synkro.comms import nccl as watched

        def late(*_):
            if what == "raises":
                raise ValueError("not today")
            time.sleep(60)

        watched.PATIENCE = patience
        with doctored(send=late):
            return synk.all_to_all(synk.xp().ones(4))

    return run


@pytest.mark.parametrize(("what", "patience"), [("sleeps", 1.0), ("raises", 60.0)])
def test_a_rank_that_is_stuck_in_c_is_ended(own, what, patience):
    works(own)
    missing = r"stuck in NCCL, which was told to begin: all_to_all .* s, as rank 1 did not begin it"
    with Watch(), pytest.raises(synk.WorkerDied, match=missing) as caught:
        own.function(stuck(patience, what), outputs=[])()
    assert caught.value.rank == 0


def test_ranks_that_are_hosts_of_their_own_have_more_time_to_connect(own):
    """The one that waits here gives up after the longer grace, which is made short."""
    assert works(own)

    def refuse():
        import os

        from synkro.comms import nccl as watched

        os.environ["NCCL_HOSTID"] = f"synkro-{synk.rank()}"
        watched._GRACE, watched._SLOW_GRACE = 1000.0, 0.5
        lose()
        if synk.rank() == 1:
            watched.Link = give_up

    own.function(refuse, outputs=[])()
    with Watch():
        assert works(own)
    assert works(own)


def test_a_link_that_one_rank_has_lost_is_made_anew_by_all(pair):
    works(pair)

    pair.function(lambda: lose() if synk.rank() == 0 else None, outputs=[])()
    assert works(pair)
    assert works(pair)


def test_large_outputs_find_a_lost_link_too(pair):
    works(pair)

    def lost(x):
        lose()
        return x.sum(axis=0)

    big = np.random.default_rng(0).standard_normal((4, 100_000))
    for outputs in ("sum", "mean"):
        got = pair.function(lost, outputs=outputs)(big)
        want = big.sum(axis=0) if outputs == "sum" else big.sum(axis=0) / 2
        np.testing.assert_allclose(got, want)


def test_where_one_rank_cannot_connect_all_go_through_host_memory_at_once(own):
    assert works(own)

    def refuse():
        from synkro.comms import nccl as watched

        watched.attempts = 0

        def count(*_):
            watched.attempts += 1
            give_up()

        lose()
        if synk.rank() == 1:
            watched.Link = count

    def told():
        from synkro.comms import nccl as watched

        return np.array([len(links()), watched.attempts])

    own.function(refuse, outputs=[])()
    assert works(own)  # long before NCCL's own patience ends, and the timeout of the session
    assert works(own)
    assert [each.tolist() for each in own.function(told, outputs=None)()] == [[0, 0], [0, 1]]


def test_a_communicator_that_is_made_too_late_is_ended_by_its_own_thread(pair):
    """Nobody else can reach it: whoever asked for it has given it up."""

    def run():
        import threading
        from types import SimpleNamespace

        from cupy.cuda import nccl

        from synkro.comms import nccl as watched

        let, ended = threading.Event(), threading.Event()

        class Slow:
            def __init__(self, *_):
                let.wait()
                self.maker = threading.get_ident()

            def abort(self):
                assert self.maker == threading.get_ident()
                ended.set()

        before = nccl.NcclCommunicator, watched.PATIENCE
        nccl.NcclCommunicator, watched.PATIENCE = Slow, 0.2
        try:
            with pytest.raises(synk.CollectiveError, match="NCCL did not connect 2 ranks within"):
                watched.Link(bytes(128), 0, 2, SimpleNamespace(overtaken=lambda: False), 0)
        finally:
            nccl.NcclCommunicator, watched.PATIENCE = before
        let.set()
        assert ended.wait(10)

    pair.function(run, outputs=[])()
    assert works(pair)


def test_an_abort_that_hangs_tells_what_came_before(own):
    works(own)

    def run():
        from synkro.comms import nccl as watched

        def fail(*_):
            raise ValueError("not today")

        watched.PATIENCE = 1.0
        with doctored(allReduce=fail, abort=lambda comm: time.sleep(60)):
            return ones()

    says = "told to give up after ValueError: not today: all_reduce"
    with Watch(), pytest.raises(synk.WorkerDied, match=says) as caught:
        own.function(run, outputs=[])()
    assert caught.value.rank == 1
