"""Collectives that cannot mean anything: every rank is told, and none is stranded."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import synkro as synk
from support.failing import leave, told
from support.sessions import per_rank
from support.waiting import Watch
from synkro import NotForked, UsageError, WorkerError

pytestmark = pytest.mark.counted_once


def test_in_the_main_program():
    with pytest.raises(NotForked, match=r"no workers yet for size\(\)"):
        synk.size()
    for name in ("rank", "rng", "barrier"):
        with pytest.raises(UsageError, match=rf"{name}\(\) is for use inside a function"):
            getattr(synk, name)()
    for call in (
        lambda: synk.reduce_scatter(np.ones(2)),
        lambda: synk.all_to_all(np.ones(2)),
        lambda: synk.send(np.ones(2), 0),
        lambda: synk.recv(0),
        lambda: synk.exchange(np.ones(2), 0),
    ):
        with pytest.raises(UsageError, match="is for use inside a function that runs on the workers"):
            call()


DIFFERENT = {
    "kind": (
        lambda r: synk.barrier() if r == 1 else synk.all_gather(np.ones(2)),
        r"barrier.*all_gather|all_gather.*barrier",
    ),
    "operation": (
        lambda r: synk.all_reduce(np.ones(2), "sum" if r else "max"),
        r'all_reduce.*rank 0 is in all_reduce with "max", but rank 1 in all_reduce with "sum"',
    ),
    "root": (lambda r: synk.broadcast(np.ones(2), root=r), r"from or to rank 0, but rank 1.*to rank 1"),
    "shape": (
        lambda r: synk.all_reduce(np.ones(2 + (r == 2))),
        r"all_reduce.*rank 0 gave shape \(2,\) and dtype float64, but rank 2 shape \(3,\)",
    ),
    "dtype": (
        lambda r: synk.reduce(np.ones(2, "f4" if r == 1 else "f8")),
        r"reduce.*rank 0 gave shape \(2,\) and dtype float64, but rank 1 .*float32",
    ),
    "tree": (
        lambda r: synk.all_reduce([np.ones(2)] * (1 + r)),
        r"rank 0 is in all_reduce .* of \[0\], but rank 1 in all_reduce .* of \[0\], \[1\]",
    ),
    "row": (
        lambda r: synk.all_gather(np.ones((2, 1 + r))),
        r"\(2, 1\).*rank 1 shape \(2, 2\).*only the number of rows may differ",
    ),
    "row at the root": (
        lambda r: synk.gather(np.ones((2, 1 + r)), root=2),
        r"\(2, 1\).*rank 1 shape \(2, 2\).*only the number of rows may differ",
    ),
    "point": (lambda r: synk.scatter(np.float64(3)), "without dimensions has no rows"),
    "points": (lambda r: synk.all_to_all(3.0), "without dimensions has no rows"),
    "point, reduced": (lambda r: synk.reduce_scatter(3.0), "without dimensions has no rows"),
    "weights": (lambda r: synk.all_reduce(np.ones(2), weight=0), "the weights of all ranks are 0"),
}

PAIRS = {
    "in a circle": (
        lambda r: synk.exchange(1, (r + 1) % 3),
        "wait for each other, and none can go on",
    ),
    "received": (
        lambda r: synk.recv(1) if r == 0 else synk.exchange(1, 0) if r == 1 else None,
        "rank 0 is in send or recv, but rank 1 was in exchange when it sent the array",
    ),
    "left alone": (
        lambda r: synk.exchange(1, 1) if r == 0 else None,
        "rank 1 returned from the function without taking part in recv from rank 1",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_do_not_agree_are_told(three, what):
    assert "(collective 1 of this call)" in str(told(*DIFFERENT[what]))


@pytest.mark.parametrize("what", PAIRS)
def test_exchanges_that_one_rank_does_not_join(three, what):
    told(*PAIRS[what])


ARGUMENTS = {
    "exchange outside": (lambda r: synk.exchange(1, 3), "with_rank=3, but 3 ranks take part"),
    "exchange with nobody": (
        lambda r: synk.exchange(1, "next"),
        "with_rank must be a rank, an int; got 'next'",
    ),
    "exchange of text": (lambda r: synk.exchange("text", r), "takes numbers, and arrays of numbers"),
    "send to oneself": (lambda r: synk.send(np.ones(1), r), "to=0 is this rank itself"),
    "receive from oneself": (lambda r: synk.recv(r), "source=0 is this rank itself"),
    "send outside": (lambda r: synk.send(np.ones(1), 3), "to=3, but 3 ranks take part"),
    "receive outside": (lambda r: synk.recv(-1), "source=-1, but 3 ranks take part"),
    "no rank": (lambda r: synk.recv("left"), "source must be a rank, an int; got 'left'"),
    "no root": (lambda r: synk.broadcast(1, root=1.5), "root must be a rank, an int; got 1.5"),
    "root outside": (lambda r: synk.reduce(np.ones(1), root=3), "root=3, but 3 ranks take part"),
    "operation": (lambda r: synk.all_reduce(np.ones(1), "median"), "op='median' is no reduce operation"),
    "gather is none": (
        lambda r: synk.reduce(np.ones(1), "gather"),
        "op='gather' is no reduce operation",
    ),
    "weight of a sum": (lambda r: synk.all_reduce(1.0, "sum", weight=2), 'weight= is for op="mean"'),
    "negative weight": (
        lambda r: synk.all_reduce(1.0, weight=-1),
        "weight must be a number of 0 or more",
    ),
    "weights": (lambda r: synk.all_reduce(1.0, weight=[1]), "weight must be a number of 0 or more"),
    "weight of nan": (lambda r: synk.all_reduce(1.0, weight=np.nan), "weight must be a number of 0"),
    "infinite weight": (lambda r: synk.all_reduce(1.0, weight=np.inf if r == 0 else 1), "of 0 or more"),
    "text": (lambda r: synk.all_reduce("text", "sum"), "takes numbers, and arrays of numbers"),
    "objects": (lambda r: synk.all_gather(np.array([None])), "takes numbers, and arrays of"),
    "nd_up": (lambda r: synk.all_gather(np.ones(1), nd_up=2), "nd_up must be 0"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
@pytest.mark.parametrize("everywhere", [True, False])
def test_arguments_that_cannot_be(three, what, everywhere):
    does, message = ARGUMENTS[what]
    error = told(lambda r: does(r) if everywhere or r == 0 else synk.barrier(), message, UsageError)
    assert error.rank == 0


def test_a_value_of_no_weight_does_not_count(three):
    def run():
        empty = synk.rank() == 1
        return synk.all_reduce(np.full(2, np.nan if empty else 3.0), weight=0 if empty else 5)

    assert [result.tolist() for result in per_rank(run)] == [[3, 3]] * 3


@pytest.mark.parametrize(
    ("dtype", "value", "weight"),
    [
        ("u1", 100, 3),
        ("i1", -3, 50),
        ("i4", 2_000_000, 2000),
        ("i8", 2**50, 16),
        ("u1", 100, 300),
        ("f2", 40000, 3),
        (">f2", 40000, 3),
        (">i4", 7, 3),
    ],
)
def test_weighted_means_are_taken_in_a_dtype_that_holds_them(three, dtype, value, weight):
    def run():
        return synk.all_reduce(np.array([value], dtype), "mean", weight=weight)

    assert [result.tolist() for result in per_rank(run)] == [[value]] * 3


def test_messages_that_nobody_received_are_in_nobodys_way(three):
    def ring(number):
        right, left = (synk.rank() + 1) % 3, (synk.rank() - 1) % 3
        if number < 0:
            for _ in range(8):  # as many as may wait
                synk.send(np.array(number), right)
            raise ValueError("planned")
        synk.send(np.array(number), right)
        return synk.recv(left)

    f = synk.function(ring, bcast_inputs="number", outputs=None)
    for number in range(5):
        with Watch(), pytest.raises(WorkerError, match="planned"):
            f(-1 - number)
        with Watch():
            assert f(number) == [number] * 3


def test_a_rank_thrown_out_of_a_collective_cannot_give_the_others_nonsense(three):
    def run():
        x = np.ones(4000)  # many, as on several hosts each rank reduces all of few
        x[:2] = 1e308
        with np.errstate(over="raise"), contextlib.suppress(FloatingPointError):
            synk.all_reduce(x, "sum")  # overflows where the first elements are reduced: on rank 0
        return synk.all_reduce(np.full(4, 5.0), "sum")

    with Watch(), pytest.raises(WorkerError, match=r"rank 0 was thrown out of all_reduce"):
        per_rank(run)


def test_collectives_from_threads_and_children_of_the_function_are_refused(three):
    def in_a_thread(r):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(synk.barrier).result()

    def in_a_child():
        child = os.fork()
        if not child:
            try:
                synk.barrier()
            except synk.UsageError:
                leave(7)
            leave(0)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    told(in_a_thread, "from a thread, or a process, that the function", UsageError)
    with Watch():
        assert per_rank(in_a_child) == [7, 7, 7]


def test_a_variable_twice_in_one_all_reduce_is_refused(three):
    w = synk.shared(np.ones(2))
    told(lambda r: synk.all_reduce([w, w], "sum"), "all_reduce got a variable twice", UsageError)
    assert synk.gather(w).tolist() == [[1, 1]] * 3


MISPLACED = {
    "broadcast": lambda r: synk.broadcast(np.ones(2), 1),
    "scatter": lambda r: synk.scatter(np.ones(2), 1),
    "reduce": lambda r: synk.reduce(np.ones(2), "sum", 1),
    "batch": lambda r: synk.scatter(np.ones(2), batch=[0]),
}


@pytest.mark.parametrize("what", MISPLACED)
def test_a_root_that_is_not_named_is_not_taken_for_something_else(two, what):
    told(MISPLACED[what], r"use it inside a function, as ``.*, root=None[,)]", UsageError)


NESTED = {
    "other keys": lambda r: {key: np.ones(2) for key in ("ab" if r else "cd")},
    "other nesting": lambda r: [[np.ones(2)], np.ones(2)] if r else [np.ones(2), [np.ones(2)]],
    "very many": lambda r: {str(i): np.ones(1) for i in range(r, 100 + r)},
}


@pytest.mark.parametrize("what", NESTED)
def test_values_of_other_nesting_do_not_meet(two, what):
    does = NESTED[what]
    told(
        lambda r: synk.all_reduce(does(r)),
        r"rank 0 is in all_reduce .* of .*, but rank 1 in all_reduce",
    )
