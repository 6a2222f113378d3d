"""Every collective of a world of ranks at once, and what NumPy says of it."""

import numpy as np

from .arrays import check, mine, serial


def everything(world, number, shape, op, root=None, dtype="f8", xp=np):
    """What rank *number* gets of every collective of *world*, which may be ``synkro`` itself.

    It gives an array of that *shape*, and one of more rows, by which the ranks differ.
    """
    rank, size = world.rank(), world.size()
    x = xp.asarray(mine(number, shape, dtype))
    more = xp.asarray(mine(number, (shape[0] + number, *shape[1:]), dtype))
    found = {
        "all_reduce": world.all_reduce(x, op),
        "nested": world.all_reduce({"a": x, "b": [x[:1]]}, "max")["b"][0],
        "weighted": world.all_reduce(x, weight=number + 0.5),
        "reduce": world.reduce(x, op, root=root),
        "broadcast": world.broadcast(x, root=root),
        "all_gather": world.all_gather(more),
        "all_gather, raised": world.all_gather(x, nd_up=1),
        "gather": world.gather(more, root=root),
        "gather, raised": world.gather(x, nd_up=1, root=root),
        "scatter": world.scatter(more, root=root),
        "all_to_all": world.all_to_all(more),
        "reduce_scatter": world.reduce_scatter(x, op),
        "exchange": world.exchange(more, size - 1 - rank),
    }
    if size > 1:
        world.send(more, (rank + 1) % size)
        found["recv"] = world.recv((rank - 1) % size)
    world.barrier()
    for name, each in found.items():
        assert each is None or type(each) is xp.ndarray, (name, type(each))
    return found


def expected(ranks, number, shape, op, root=None, dtype="f8"):
    """The same by NumPy, in the world of *ranks*; where rank 0 is not among these, it is no root."""
    place, ranks = list(ranks).index(number), list(ranks)
    root = 0 if root is None else root
    xs = [mine(rank, shape, dtype) for rank in ranks]
    more = [mine(rank, (shape[0] + rank, *shape[1:]), dtype) for rank in ranks]
    found = {
        "all_reduce": serial(op, xs),
        "nested": serial("max", [x[:1] for x in xs]),
        "weighted": np.average(xs, axis=0, weights=[rank + 0.5 for rank in ranks]),
        "reduce": serial(op, xs),
        "broadcast": xs[root],
        "all_gather": np.concatenate(more),
        "all_gather, raised": np.stack(xs),
        "gather": np.concatenate(more),
        "gather, raised": np.stack(xs),
        "scatter": np.array_split(more[root], len(ranks))[place],
        "all_to_all": np.concatenate([np.array_split(each, len(ranks))[place] for each in more]),
        "reduce_scatter": np.array_split(serial(op, xs), len(ranks))[place],
        "exchange": more[len(ranks) - 1 - place],
    }
    if len(ranks) > 1:
        found["recv"] = more[place - 1]
    at_root = dict.fromkeys(["reduce", "gather", "gather, raised"]) if place != root else {}
    return found | at_root


def check_everything(found, ranks, number, *args, **options):
    wanted = expected(ranks, number, *args, **options)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        if want is None:
            assert found[name] is None, name
        else:
            check(found[name], want)
