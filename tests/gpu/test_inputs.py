"""Inputs on their way to GPUs: all kinds, never stale, never disturbed, and in bounded memory."""

import numpy as np
import pytest

import synkro as synk
from support.gpus import pools, serves
from synkro.errors import InvalidType, OutputError

session = serves(pools("one", "two", "four", rarely=("one", "four")))


def total(x):
    assert isinstance(x, synk.xp().ndarray), type(x)
    return x.sum(axis=0)


def rows(x):
    assert isinstance(x, synk.xp().ndarray), type(x)
    return x


@pytest.fixture(scope="module")
def gathered(session):
    return session.function(rows, outputs="gather")


@pytest.fixture(scope="module")
def summed(session):
    return session.function(total, outputs="sum")


@pytest.fixture(scope="module")
def scaled(session):
    """Sums of rows times a broadcast factor."""
    return session.function(lambda x, y: (x * y).sum(axis=0), outputs="sum", bcast_inputs=["y"])


def test_rows_are_numbered_on_the_host(session):
    f = session.function(lambda x: (synk.rows(), x), outputs="gather")
    x = np.arange(40.0)
    for batch in (None, slice(None, None, -3), [7, 7, 0, 39]):
        for slices in (1, 3):
            numbers, values = f(x, batch=batch, num_slices=slices)
            assert numbers.dtype == np.int64
            assert np.array_equal(values, x[numbers])
            assert np.array_equal(values, x if batch is None else x[batch])


def test_pieces_that_fit_a_cache_are_for_cpus(session):
    f = session.function(lambda x: np.array([len(x)]), outputs="gather")
    whole = f(np.zeros((200_000, 32)))
    assert np.array_equal(f(np.zeros((200_000, 32)), num_slices="auto"), whole)


# ── kinds of inputs ──────────────────────────────────────────────────────────────────────────────


SHAPES = [(1,), (7,), (5, 3), (64, 1000), (3, 0), (9, 2, 2), (300_001,)]
TABLE = np.arange(120.0).reshape(12, 10)
LAYOUTS = [TABLE[::2], TABLE[::-1], TABLE[:, ::-1], TABLE.T, np.asfortranarray(TABLE), TABLE[3:7, 2:5]]
LAYOUTS += [np.broadcast_to(TABLE[0], TABLE.shape), TABLE.astype(">f8"), TABLE.tolist()]


@pytest.mark.parametrize(
    "given", [*[np.arange(float(np.prod(shape))).reshape(shape) for shape in SHAPES], *LAYOUTS]
)
def test_arrays_however_they_lie(session, gathered, given):
    array = np.asarray(given)
    for each in (given, session.data(array)):
        for slices in (1, 3):
            got = gathered(each, num_slices=slices)
            assert got.dtype == array.dtype.newbyteorder("=")
            assert np.array_equal(got, array)


def test_minibatch_data_are_in_the_order_of_the_batch(session):
    array = np.arange(40.0).reshape(20, 2)
    f = session.function(lambda x, m: (x, m), outputs="gather")
    x = session.data(array)
    for batch in (slice(5, 12), [7, 5, 11, 7], np.array([6, 5])):
        part = session.data(array[batch] * 10, minibatch=True)
        whole, mini = f(x, part, batch=batch, num_slices=2)
        assert np.array_equal(whole, array[batch])
        assert np.array_equal(mini, array[batch] * 10)


def test_no_rows_no_dimensions_and_numbers(session, scaled):
    x = np.ones((6, 2))
    for factor in (3, 2.5, np.float32(2), np.array(2.0), session.data(np.array(2.0))):
        assert scaled(x, factor).tolist() == [6 * float(factor)] * 2
    none = session.function(lambda x, y: y.sum() + len(y), outputs="max", bcast_inputs=["y"])
    assert none(x, np.zeros((0, 3))) == 0
    assert none(x, session.data(np.zeros((4, 0)))) == 4


def test_numbers_arrive_as_they_are(session):
    def kinds(n, b, z):
        return type(n) is int and type(b) is bool and type(z) is float

    assert session.function(kinds, outputs="min", bcast_inputs=["n", "b", "z"])(3, True, 0.5)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("offset", [0, 24])
def test_files_are_mapped_by_the_workers(session, gathered, summed, tmp_path, mode, offset):
    array = np.arange(60_000.0).reshape(-1, 4)
    path = tmp_path / "table"
    path.write_bytes(bytes(offset) + array.tobytes())
    file = np.memmap(path, "f8", mode, offset, array.shape)
    x = session.data(file)
    for slices in (1, 5):
        assert np.array_equal(gathered(x, num_slices=slices), array)
        chosen = np.random.default_rng(slices).permutation(len(array))[:999]
        assert np.array_equal(gathered(x, batch=chosen, num_slices=slices), array[chosen])
        assert np.array_equal(gathered(x, batch=slice(None, None, -7), num_slices=slices), array[::-7])
    assert np.allclose(summed(file), array.sum(axis=0))


# ── never stale ──────────────────────────────────────────────────────────────────────────────────


def full(x, value):
    return np.full(x.shape, value, x.dtype)


def by_row(x, value):
    for index in range(len(x)):
        x[index] = value


def by_data_row(x, value):
    for row in x.data:
        row[...] = value


def in_place(x, value):
    x.data.fill(0)
    x[:] += value


def by_growing(x, value):
    length = len(x)
    x.set_length(3 * length + 1)
    x[:] = value
    x.set_length(length)


def by_freeing(x, value):
    new = full(x, value)
    x.free_memory()
    x.set_value(new)


WRITERS = {
    "index": lambda x, value: x.__setitem__(Ellipsis, value),
    "slice": lambda x, value: x.__setitem__(slice(None), value),
    "row": by_row,
    "set_value": lambda x, value: x.set_value(full(x, value)),
    "data": lambda x, value: x.data.__setitem__(Ellipsis, value),
    "data_row": by_data_row,
    "out": lambda x, value: np.add(np.zeros(x.shape), value, out=x.data),
    "copyto": lambda x, value: np.copyto(x.data, value),
    "in_place": in_place,
    "asarray": lambda x, value: np.asarray(x).__setitem__(Ellipsis, value),
    "memoryview": lambda x, value: (
        memoryview(x.data).cast("B").__setitem__(slice(None), full(x, value).tobytes())
    ),
    "growing": by_growing,
    "freeing": by_freeing,
    "condition": lambda x, value: x.set_value(x.condition_data(full(x, value))),
}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("shape", [(6, 2), (300, 301)])
def test_data_are_as_they_were_written_last(session, scaled, summed, write, shape):
    """As a broadcast input, and as a scattered one."""
    x, y = np.ones((4, *shape)), session.data(np.zeros(shape))
    for value in (1.0, 2.0, 3.0):
        WRITERS[write](y, value)
        for _ in range(2):
            assert np.array_equal(scaled(x, y), np.full(shape, 4 * value))
            assert np.array_equal(summed(y, num_slices=2), np.full(shape[1], shape[0] * value))


def test_views_that_the_user_keeps_write_through(session, scaled):
    y = session.data(np.zeros((4, 3)))
    views = [y.data, y[:], y.data[1], np.asarray(y), y.data.T, y.data.reshape(-1)[::2]]
    views = [view for view in views if np.shares_memory(view, y.data)]
    assert len(views) >= 4
    x = np.ones((4, 4, 3))
    for number, view in enumerate(views):
        scaled(x, y)
        view[...] = number + 1
        assert np.array_equal(scaled(x, y), 4 * y.data)


def test_a_view_from_before_a_call_writes_after_many(session, scaled):
    """A written page must not depend on when the user took hold of it."""
    y = session.data(np.zeros(3))
    held = y.data
    for turn in range(20):
        held[turn % 3] += 1
        for _ in range(3):
            assert np.array_equal(scaled(np.ones((4, 3)), y), 4 * held)


def test_plain_arrays_are_as_they_are_at_the_call(session, scaled):
    y = np.zeros((200, 100))
    x = np.ones((4, 200, 100))
    for turn in range(4):
        y += 1
        assert np.array_equal(scaled(x, y), np.full((200, 100), 4.0 * (turn + 1)))
    y = y[::2]  # another array of another shape, in the same parameter
    assert np.array_equal(scaled(x[:, ::2], y), np.full((100, 100), 16.0))


def test_data_of_two_that_took_turns_in_memory(session, scaled):
    """The next one may lie where the last one lay."""
    x = np.ones((4, 1000))
    for value in range(12):
        y = session.data(np.full(1000, float(value)))
        assert np.array_equal(scaled(x, y), np.full(1000, 4.0 * value))
        del y


def test_files_that_change_are_read_anew(session, scaled, tmp_path):
    file = np.memmap(tmp_path / "y", "f8", "w+", shape=(1000,))
    y = session.data(file)
    for value in (1.0, 2.0, 3.0):
        file[:] = value
        file.flush()
        for _ in range(2):
            assert np.array_equal(scaled(np.ones((4, 1000)), y), np.full(1000, 4 * value))


# ── never disturbed ──────────────────────────────────────────────────────────────────────────────


def spoiling(x, y):
    """A function that writes where it should only read."""
    result = (x * y).sum(axis=0)
    x *= 0
    y *= 0
    return result


@pytest.mark.parametrize("width", [3, 60_000])
def test_writing_into_inputs_disturbs_no_later_call_and_no_other_function(session, scaled, width):
    f = session.function(spoiling, outputs="sum", bcast_inputs=["y"])
    x, y = session.data(np.ones((8, width))), session.data(np.full(width, 2.0))
    for slices in (1, 1, 2, 1):
        assert np.array_equal(f(x, y, num_slices=slices), np.full(width, 16.0))
        assert np.array_equal(scaled(x, y), np.full(width, 16.0))
    assert (x[:] == 1).all()
    assert (y[:] == 2).all()


def test_an_input_that_a_variable_keeps_stays_as_it_was(session):
    """A replica may be an input's own array: later calls must not write into it."""
    kept = session.shared(np.zeros((0, 2)))

    def keep(x):
        kept.value = x
        return x.sum()

    f = session.function(keep, outputs="sum")
    first = np.arange(16.0).reshape(8, 2)
    f(first)
    other = session.function(lambda x: x.sum(), outputs="sum")
    for value in range(3):
        other(np.full((8, 2), float(value)), num_slices=2)
        assert np.array_equal(session.gather(kept, nd_up=0), first)


def test_outputs_that_are_inputs_are_those_of_their_slice(session, gathered):
    """Buffers take turns; what a slice returned must not be the next one's rows."""
    array = np.arange(40_000.0).reshape(4000, 10)
    for slices in (2, 3, 8):
        assert np.array_equal(gathered(array, num_slices=slices), array)
        pieces = session.function(rows, outputs=None)(array, num_slices=slices)
        assert np.array_equal(np.concatenate(pieces), array)
        kept = session.function(rows, outputs="keep")(array, num_slices=slices)
        gathered(-array, num_slices=slices)
        assert np.array_equal(np.asarray(kept), array)
        views = session.function(lambda x: x[1:, ::-1], outputs="gather")(array, num_slices=slices)
        assert len(views) == 4000 - slices * session.n_parallel


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_variable_keeps_what_its_slice_saw(session, when):
    kept, turn = session.shared(np.zeros((0, 64))), session.shared(0)
    array = np.arange(4096.0 * session.n_parallel).reshape(-1, 64)

    def keep(x):
        if int(turn.value) == when:
            kept.value = x
        turn.value += 1
        return x.sum()

    f = session.function(keep, outputs="sum")
    assert f(array, num_slices=8) == array.sum()
    first = np.concatenate(
        [np.array_split(shard, 8)[when] for shard in np.array_split(array, session.n_parallel)]
    )
    assert np.array_equal(session.gather(kept, nd_up=0), first)


def test_gpus_have_no_strings_dates_and_records(session):
    words = np.array(["a", "bc", "def", "g"])
    arrays = words, np.arange(4).view("M8[s]"), np.zeros(4, [("a", "f4"), ("b", "S3")])
    f = session.function(lambda x: x, outputs="gather")
    for array in arrays:
        for given in (array, session.data(array)):
            with pytest.raises(InvalidType, match="which GPUs do not have: give numbers, such as codes"):
                f(given)
        with pytest.raises(InvalidType, match="which GPUs do not have"):
            session.shared(array)
    with pytest.raises(OutputError, match="GPUs do not have <U3, so they cannot keep it"):
        session.function(lambda x, w: w, bcast_inputs="w", outputs="keep")(np.ones(4), words)
    both = session.function(lambda x, w: (w, w), bcast_inputs="w", outputs=["gather", None])
    rows, each = both(np.ones(session.n_parallel), words)
    assert rows.tolist() == words.tolist() * session.n_parallel
    assert all(type(one) is np.ndarray for one in each)
