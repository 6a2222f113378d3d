"""What happens when a rank does not do in NCCL what it has agreed to: nobody waits for ever.

The ranks have voted by then, so only faults are left that no test can make on real hardware: here a
rank's communicator is told to swallow an operation, to fail, or to report an error.
"""

import numpy as np
import pytest

import synkro as synk

from .conftest import crews, settled, started


@pytest.fixture(scope="module", params=crews("two")[1:])
def pair(request):
    with settled(request.param) as devices, started(request.param, devices) as session:
        session.function(lambda: __import__("cupy.cuda.nccl"), outputs=[])()
        yield session


def ones():
    return synk.all_reduce(synk.xp().ones(5), op="sum")


def works(session):
    return session.function(lambda: ones().get(), outputs=None)()[1].tolist() == [2.0] * 5


def spoilt(patience, what):
    """Rank 1's next reduction goes wrong by *what*, with so many seconds of *patience* everywhere."""

    def run():
        from cupy.cuda import nccl

        from synkro.comms import nccl as watched

        class Spoilt:
            def __init__(self, comm):
                self.comm = comm

            def __getattr__(self, name):
                return getattr(self.comm, name)

            def allReduce(self, *arguments):
                if what == "raises":
                    raise ValueError("not today")
                if what == "refuses":
                    raise nccl.NcclError(5)
                if what == "reports":
                    self.comm.allReduce(*arguments)
                    self.check_async_error = lambda: (_ for _ in ()).throw(nccl.NcclError(1))

        before = watched.PATIENCE
        watched.PATIENCE = patience
        links = synk.world.current.comm._links._known
        if synk.rank() == 1:
            for _, link in links.values():
                link._comm = Spoilt(link._comm)
        try:
            return ones()
        finally:
            watched.PATIENCE = before

    return run


def test_an_operation_that_a_rank_never_issues_is_aborted(pair):
    works(pair)
    with pytest.raises(synk.WorkerError) as caught:
        pair.function(spoilt(1.0, "swallows"), outputs=[])()
    assert isinstance(caught.value.original, synk.CollectiveError)
    assert "all_reduce (collective 1 of this call): not complete after 1 s, though all" in str(
        caught.value
    )
    assert works(pair)


def test_an_exception_within_nccl_does_not_strand_the_others(pair):
    works(pair)
    with pytest.raises(synk.WorkerError, match=r"rank 1 failed .* ValueError: not today"):
        pair.function(spoilt(60.0, "raises"), outputs=[])()
    assert works(pair)


@pytest.mark.parametrize("what", ["refuses", "reports"])
def test_an_error_of_nccl_is_named(pair, what):
    works(pair)
    with pytest.raises(synk.WorkerError, match=r"rank 1 failed .*NCCL reports .*(NCCL|nccl)"):
        pair.function(spoilt(60.0, what), outputs=[])()
    assert works(pair)


def test_a_link_that_one_rank_has_lost_is_made_anew_by_all(pair):
    works(pair)

    def lose():
        if synk.rank() == 0:
            for _, link in synk.world.current.comm._links._known.values():
                link.abort()

    pair.function(lose, outputs=[])()
    assert works(pair)
    assert works(pair)


def test_large_outputs_find_a_lost_link_too(pair):
    works(pair)

    def lose(x):
        for _, link in synk.world.current.comm._links._known.values():
            link.abort()
        return x.sum(axis=0)

    big = np.random.default_rng(0).standard_normal((4, 100_000))
    for outputs in ("sum", "mean"):
        got = pair.function(lose, outputs=outputs)(big)
        want = big.sum(axis=0) if outputs == "sum" else big.sum(axis=0) / 2
        np.testing.assert_allclose(got, want)


def test_where_one_rank_cannot_connect_all_go_through_host_memory_at_once(pair):
    def refuse():
        def give_up(*_):
            raise synk.CollectiveError("no more sockets")

        links = synk.world.current.comm._links
        links._known.clear()
        if synk.rank() == 1:
            links._connect = give_up

    pair.function(refuse, outputs=[])()
    assert works(pair)  # long before NCCL's own patience ends, and the timeout of the session
    known = pair.function(
        lambda: next(iter(synk.world.current.comm._links._known.values()))[0], outputs=None
    )
    assert known() == [-1, -1]
    assert works(pair)
