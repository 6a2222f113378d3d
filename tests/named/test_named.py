"""Memory with a name: other programs see it, and it sees what they write; what ends the name."""

import contextlib
import errno
import mmap
import os
import pathlib
import re
import struct
import subprocess

import numpy as np
import pytest

import synkro as synk
from support.named import PAGE, files
from support.sessions import lasting
from support.targets import BIG, SMALL
from support.waiting import wait_until
from synkro.memory import named

pytest.importorskip("posix_ipc", reason="needs posix_ipc, which has no wheel for this Python")

pytestmark = [pytest.mark.quick, pytest.mark.one_host]

session = lasting(2)
SELECTIONS = [None, 3, slice(1, None, 2), slice(None, None, -1), [6, 0, 0, 5], np.arange(7) % 3 == 0]


@pytest.fixture
def x(session, name):
    """A table with a name."""
    data = session.data(table(), shm_name=name, name="frames")
    yield data
    data.free_memory()


def table(rows=7, dtype="f8"):
    return np.arange(3 * rows).reshape(rows, 3).astype(dtype)


def seen(session, data, **options):
    """What the workers see of *data*."""
    return session.function(lambda x: x, outputs="gather")(data, **options)


@contextlib.contextmanager
def plain(name):
    """100 bytes of memory that no header describes."""
    path = pathlib.Path("/dev/shm" + name)
    path.write_bytes(bytes(100))
    yield
    path.unlink()


def writes_of(memory):
    """How often it has been written to, as it says itself."""
    return struct.unpack_from("<Q", memory, len(memory) - 128)[0]


def other_program(name):
    """The memory as another program maps it."""
    with open(f"/dev/shm{name}", "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


# ── an array like any other ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", ">i4", "f4", "f8", "c16", "bfloat16"])
def test_what_is_made_is_what_is_attached(session, name, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    expected = table(dtype=dtype)
    x = session.data(expected, shm_name=name)
    y = session.attach(name)
    for data in (x, y):
        assert data.dtype == expected.dtype
        assert np.array_equal(data, expected)
        assert np.array_equal(seen(session, data), expected)
    x.free_memory()


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (7, 3), (2, 3, 4, 5)])
def test_any_shape(session, name, shape):
    x = session.data(shape=shape, shm_name=name, dtype="i4")
    x[...] = np.arange(x.size).reshape(shape)
    total = session.function(lambda x: x.sum(), outputs="max", bcast_inputs="x")
    assert total(x) == total(session.attach(name)) == np.arange(x.size).sum()
    x.free_memory()


@pytest.mark.parametrize("batch", SELECTIONS, ids=str)
@pytest.mark.parametrize("slices", [1, 3])
def test_calls_are_exact(session, name, x, batch, slices):
    expected = table()
    rows = expected[slice(batch) if batch is None or isinstance(batch, int) else batch]
    total = session.function(lambda x, w: (x * w).sum(axis=0), outputs="sum", bcast_inputs="w")
    for data in (x, session.attach(name)):
        found = total(data, np.arange(3.0), batch=batch, num_slices=slices)
        assert np.array_equal(found, (rows * np.arange(3.0)).sum(axis=0))
        if batch is None:
            assert np.array_equal(total.as_serial(data, np.arange(3.0)), found)
        assert np.array_equal(seen(session, data, batch=batch), rows)


def test_check_and_broadcast_inputs(session, name, x):
    y = session.attach(name)
    f = session.function(lambda x, all: x @ all[:3], outputs="gather", bcast_inputs="all")
    assert np.array_equal(f(y, y), table() @ table()[:3])
    f.check(y, y)


def test_it_is_an_argument_in_a_tuple(session, name, x):
    f = session.function(lambda both: both["a"].sum() + both["b"].sum(), outputs="sum")
    for first in (0, -7):
        other_program(name)[4096:4104] = np.float64(first).tobytes()
        assert f({"a": x, "b": session.attach(name)}) == 2 * (table().sum() + first)


# ── other programs ───────────────────────────────────────────────────────────────────────────────────


def test_the_layout_is_the_documented_one(session, name):
    x = session.data(table(dtype="<f4"), shm_name=name)
    memory = other_program(name)
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \| `(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert [(field, int(at)) for at, _, field in rows] == [(f, at) for f, _, at in named._FIELDS]
    assert memory[4096 : 4096 + 84] == table(dtype="<f4").tobytes()
    assert len(memory) == 4096 + 128 + 192
    tail = memory[-192:]
    assert tail[:8] == b"SYNKSHM\0"
    assert struct.unpack_from("<II16sQQQ", tail, 8) == (2, 0, bytes(16), 84, 0, 0)
    assert tail[56:64] == bytes(8)
    assert os.stat(f"/dev/shm{name}").st_mode & 0o777 == 0o600
    x.free_memory()


@pytest.mark.parametrize(
    "dtype", ["f8", ">i2", "?", "S5", "M8[s]", [("a", "f4"), ("b", "i8", (2,))]], ids=str
)
def test_numpy_loads_it(session, name, dtype):
    """By a path, in any program; and what NumPy has saved there is attached."""
    expected = np.zeros((7, 3), dtype)
    expected.view(np.uint8)[:, ::3] = 1 if dtype == "?" else 65
    x = session.data(expected, shm_name=name)
    for how in ({"mmap_mode": "r"}, {}):
        found = np.load(f"/dev/shm{name}", **how)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    there = np.load(f"/dev/shm{name}", mmap_mode="r+")
    there[0] = there[1]
    assert np.array_equal(x[0], x[1])
    x.free_memory()
    np.save(f"/dev/shm{name}.npy", expected)
    try:
        y = session.attach(f"{name}.npy", writable=True)
        assert np.array_equal(y, expected)
        y[1] = y[0]
        assert np.array_equal(np.load(f"/dev/shm{name}.npy"), y)
        np.save(f"/dev/shm{name}.npy", np.asfortranarray(table()))
        with pytest.raises(synk.InvalidValue, match="'fortran_order' is True"):
            session.attach(f"{name}.npy")
    finally:
        os.unlink(f"/dev/shm{name}.npy")


@pytest.mark.parametrize("fields", [300, 600])
def test_a_header_of_a_file_may_be_longer_than_that_of_ours(session, name, fields):
    """As long as NumPy reads it."""
    rows = np.zeros(3, [(f"field_{number}", "f4") for number in range(fields)])
    rows["field_299"] = [1, 2, 3]
    path = pathlib.Path(f"/dev/shm{name}")
    with path.open("wb") as file:
        np.save(file, rows)
    try:
        if fields == 600:
            with pytest.raises(
                synk.InvalidValue, match=r"cannot be read: .*Header info length .* large"
            ):
                session.attach(name)
        else:
            total = session.function(lambda rows: rows["field_299"].sum(), outputs="sum")
            assert total(session.attach(name)) == 6
    finally:
        path.unlink()


def test_what_npy_files_do_not_know_is_bytes_there(session, name):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = session.data(table(dtype=bfloat16), shm_name=name)
    found = np.load(f"/dev/shm{name}", mmap_mode="r")
    assert found.dtype == "V2"
    assert np.array_equal(found.view(bfloat16), x)
    x.free_memory()


@pytest.mark.parametrize(
    "dtype",
    [
        lambda known: known.float8_e5m2,
        lambda known: [("a", known.bfloat16)],
        lambda known: [("a", "f4"), ("b", [("c", known.bfloat16, (2,))], (3,))],
    ],
    ids=["alone", "a field", "in a field"],
)
def test_what_attach_would_not_know_is_refused_when_it_is_made(session, name, dtype):
    values = np.zeros(3, dtype(pytest.importorskip("ml_dtypes")))
    for make in (
        lambda: session.data(values, shm_name=name),
        lambda: session.ring(name, slots=2, shape=(3,), dtype=values.dtype),
    ):
        with pytest.raises(synk.InvalidType, match=r"bfloat16, but that in no record; got .* convert"):
            make()


def test_names_of_fields_that_npy_files_do_not_have(session, name):
    with pytest.raises(synk.InvalidType, match="names in Latin-1"):
        session.data(np.zeros(3, [("名", "f8")]), shm_name=name)
    fields = [(f"field_{number}", "f8") for number in range(300)]
    with pytest.raises(synk.InvalidValue, match="too long for memory with a name"):
        session.data(np.zeros(3, fields), shm_name=name)


def test_writes_are_counted_after_them_and_reads_are_not(session, name):
    x = session.data(shape=(7, 3), shm_name=name)
    memory = other_program(name)
    assert writes_of(memory) == 0
    for write in (
        lambda: x.__setitem__(0, 1),
        lambda: x.set_value(table()),
        lambda: x.__iadd__(1),
        lambda: np.add.at(x, [0], 1),
        lambda: np.multiply(x, 2, out=x),
    ):
        before = writes_of(memory)
        write()
        assert writes_of(memory) == before + 1
    before = writes_of(memory)
    assert x[:].sum() == x.data.sum() == np.sum(x)
    seen(session, x)
    assert writes_of(memory) == before
    session.attach(name, writable=True)[0, 0] = 5
    assert writes_of(memory) == before + 1
    assert x[0, 0] == 5
    x.free_memory()


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
def test_results_that_go_there_are_counted(session, name, columns):
    """This process writes the small ones, and the workers the large ones."""
    x = session.data(shape=(7, columns), shm_name=name)
    f = session.function(lambda rows: rows + 1, outputs="gather").options(out=x)
    for count in (1, 2):
        assert f(np.zeros(x.shape)) is x
        assert writes_of(other_program(name)) == count
    assert np.array_equal(x, np.ones(x.shape))
    x.free_memory()


def test_every_call_sees_what_another_program_has_written(session, name, x):
    y = session.attach(name)
    memory = other_program(name)
    total = session.function(lambda x: x[:, 0].sum(), outputs="sum")
    for number in range(5):
        memory[4096:4104] = np.float64(number).tobytes()
        expected = table()[1:, 0].sum() + number
        assert total(x) == total(y) == expected


@pytest.mark.programs
def test_memory_of_multiprocessing_is_attached(name, run_python):
    run_python(f"""
from multiprocessing.shared_memory import SharedMemory
import numpy as np, synkro as synk
synk.fork(2, verbose=False)
memory = SharedMemory({name[1:]!r}, create=True, size=8 + 168)
theirs = np.ndarray((7, 3), "f8", memory.buf, 8)
theirs[...] = np.arange(21).reshape(7, 3)
x = synk.attach(memory.name, dtype="f8", shape=(7, 3), offset=8)
seen = synk.function(lambda x: x, outputs="gather")
assert np.array_equal(seen(x), theirs)
theirs[0] = -1
assert np.array_equal(seen(x), theirs)
y = synk.attach({name!r}, "f8", (7, 3), 8, writable=True)
y[1] = 5
assert (theirs[1] == 5).all()
del theirs
memory.close()
memory.unlink()
assert x[1, 0] == 5  # which goes on
""")


@pytest.mark.programs
def test_multiprocessing_opens_what_was_made_and_may_remove_its_name(session, name, x, run_python):
    run_python(f"""
from multiprocessing.shared_memory import SharedMemory
import numpy as np
memory = SharedMemory({name[1:]!r})
rows = np.ndarray((7, 3), 'f8', memory.buf, 4096)
assert rows[6, 2] == 20
rows[0, 0] = 100
del rows
memory.close()
""")
    assert np.array_equal(seen(session, x), x)
    assert x[0, 0] == 100
    pathlib.Path(f"/dev/shm{name}").unlink(missing_ok=True)  # as up to Python 3.12
    with pytest.raises(synk.InvalidValue, match=r"no shared memory .* up to Python 3\.12"):
        session.attach(name)
    x.set_value(2 * table())
    assert np.array_equal(seen(session, x), 2 * table())


def test_a_program_in_c_reads_and_writes_it(session, name, x, programs_in_c):
    memory = other_program(name)
    before = writes_of(memory)
    subprocess.run([programs_in_c / "double", name], check=True)
    assert np.array_equal(x, 2 * table())
    assert np.array_equal(seen(session, x), 2 * table())
    assert writes_of(memory) == before + 1


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong", ["", "/", "/a/b", "..", "/.", "a\0b", "/" + "x" * 255])
def test_names_that_cannot_be(session, wrong):
    for make in (lambda: session.data(np.ones(3), shm_name=wrong), lambda: session.attach(wrong)):
        with pytest.raises(synk.InvalidValue, match="a name of shared memory"):
            make()
    with pytest.raises(synk.InvalidType, match="a name of shared memory is a string"):
        session.attach(7)


def test_the_slash_may_be_left_out(session, name):
    x = session.data(table(), shm_name=name[1:])
    assert np.array_equal(session.attach(name), session.attach(name[1:]))
    x.free_memory()


def test_the_longest_name(session):
    longest = f"/synkro-test-{os.getpid()}".ljust(255, "x")
    x = session.data(table(), shm_name=longest)
    assert np.array_equal(session.attach(longest), table())
    x.free_memory()
    assert not files(longest)


def test_a_name_that_is_in_use(session, name):
    x = session.data(table(), shm_name=name)
    with pytest.raises(synk.InvalidValue, match=r"this program has .* free_memory\(\)"):
        session.data(table(), shm_name=name)
    x.free_memory()
    with plain(name), pytest.raises(synk.InvalidValue, match=r"in use: attach\(.*doctor.*another name"):
        session.data(table(), shm_name=name)


@pytest.mark.parametrize("kind", ["data", "ring"])
def test_ctrl_c_while_it_is_made_leaves_nothing(session, name, kind, interrupted_making):
    make, close = {
        "data": (lambda: session.data(np.ones(3), shm_name=name), synk.Data.free_memory),
        "ring": (lambda: session.ring(name, slots=2, shape=3), synk.Ring.close),
    }[kind]
    with pytest.raises(KeyboardInterrupt):
        make()
    interrupted_making.undo()
    assert not files(name)
    close(make())


@pytest.mark.parametrize("dtype", ["f8", ">i2"])
def test_who_finds_the_name_finds_the_values(session, name, dtype, monkeypatch):
    found, link = [], named._link

    def linked(fd, name):
        done = link(fd, name)
        found.append(np.load(f"/dev/shm{name}"))
        found.append(writes_of(other_program(name)))
        return done

    monkeypatch.setattr(named, "_link", linked)
    x = session.data(table(), dtype=dtype, force_cast=True, shm_name=name)
    assert np.array_equal(found[0], table())
    assert found[1] == writes_of(other_program(name)) == 1
    x.free_memory()


def test_it_keeps_its_shape(session, name, x):
    for change in (
        lambda: x.set_length(8),
        lambda: x.set_length(6),
        lambda: x.set_shape((3, 7)),
        lambda: x.set_value(table(8)),
    ):
        with pytest.raises(synk.InvalidValue, match=r"the Data 'frames' lies in .* keeps its shape"):
            change()
    assert np.array_equal(x, table())
    x.set_length(7)
    x.set_value(-table())
    assert np.array_equal(seen(session, x), -table())
    with pytest.raises(synk.InvalidValue, match="cannot grow later"):
        session.data(ndim=2, shm_name=f"{name}-2")
    with pytest.raises(synk.InvalidValue, match="oversize"):
        session.data(table(), oversize=2, shm_name=f"{name}-2")
    with pytest.raises(synk.InvalidValue, match="writable=True"):
        session.attach(name).set_value(table())


def test_attach_asks_for_what_is_there(session, name):
    with pytest.raises(synk.InvalidValue, match="there is no shared memory with the name"):
        session.attach(name)
    with plain(name):
        for arguments, message in (
            ({}, r"is no \.npy file"),
            ({"dtype": "f8"}, "together"),
            ({"offset": 8}, "without a header"),
            ({"dtype": "f8", "shape": 13}, "has 100 bytes, and float64 .* needs 104"),
            ({"dtype": "f8", "shape": 3, "offset": 80}, "from byte 80 on needs 104"),
            ({"dtype": "f8", "shape": 2**57}, "needs 1152921504606846976"),
            ({"dtype": "f8", "shape": 3, "offset": -1}, "offset must be 0 or more"),
        ):
            with pytest.raises(synk.InvalidValue, match=message):
                session.attach(name, **arguments)
        with pytest.raises(synk.InvalidType):
            session.attach(name, dtype="O", shape=3)


def test_memory_with_a_header_is_not_taken_for_plain(session, name, x):
    with pytest.raises(synk.InvalidValue, match="begins with a header"):
        session.attach(name, dtype="f8", shape=3)
    assert session.attach(name, dtype="f8", shape=3, offset=4104)[0] == 1


TAIL = 4096 + 192  # of a table


def header(descr, shape=(7, 3), order=False):
    """What the header of an ``.npy`` file says, with blanks."""
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}"
    return text.encode().ljust(100)


@pytest.mark.parametrize(
    ("at", "form", "value", "says"),
    [
        (0, "8s", b"SYNKSHM\0", "is of version 1, and this is Synkro for version 2"),
        (6, "B", 9, "begins as that of an .npy file, and cannot be read: "),
        (8, "<H", 5, "cannot be read: "),
        (8, "<H", 60000, "cannot be read: "),
        (10, "3s", b"{{{", "cannot be read: "),
        (10, "100s", header("<f8", order=True), "field 'fortran_order' is True"),
        (10, "100s", header("<f8", (-7, 3)), "field '"),
        (10, "100s", header("<f4"), "field 'nbytes' is 168, and has to be 84"),
        (TAIL + 8, "<I", 3, "is of version 3"),
        (TAIL + 12, "<I", 1, "field 'descr' is float64, and has to be that of slots"),
        (TAIL + 12, "<I", 9, "field 'kind' is 9, and has to be 0, an array, or 1, a ring"),
        (TAIL + 16, "8s", b"bfloat16", "field 'dtype' is b'bfloat16', and has to be empty, or bfloat16"),
        (TAIL + 16, "16s", 16 * b"f", "field 'dtype' is"),
        (TAIL + 32, "<Q", 8, "field 'nbytes' is 8, and has to be 168"),
        (TAIL + 40, "<Q", 5, "field 'slots' is 5, and has to be 0"),
        (TAIL + 48, "<Q", 64, "field 'slot_bytes' is 64"),
    ],
)
def test_a_header_that_lies_is_an_error(session, name, x, at, form, value, says):
    struct.pack_into(form, other_program(name), at, value)
    with pytest.raises(synk.InvalidValue, match=f"header of the shared memory {name} .*{says}"):
        session.attach(name)


def test_a_segment_that_was_cut_is_an_error(session, name, x):
    os.truncate(f"/dev/shm{name}", 4000)
    with pytest.raises(synk.InvalidValue, match="cannot be read: "):
        session.attach(name)
    os.truncate(f"/dev/shm{name}", 0)
    with pytest.raises(synk.InvalidValue, match="empty"):
        session.attach(name)
    os.truncate(f"/dev/shm{name}", 4264)


def test_a_full_machine_is_an_error_and_leaves_no_name(session, name, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(synk.SharedMemoryError, match="No space left"):
        session.data(table(), shm_name=name)
    assert not files(name)


# ── what ends a name ─────────────────────────────────────────────────────────────────────────────────


def test_free_memory_ends_it_and_what_is_attached_goes_on(session, name):
    x = session.data(table(), shm_name=name)
    y = session.attach(name)
    x.free_memory()
    assert not files(name)
    assert np.array_equal(seen(session, y), table())
    again = session.data(-table(), shm_name=name)
    assert np.array_equal(session.attach(name), -table())
    assert np.array_equal(seen(session, y), table())
    again.free_memory()


def test_dropping_the_data_does_not_end_it_but_closing_the_session_does(name):
    with synk.Session(1, verbose=False) as own:
        own.data(table(), shm_name=name)
        assert np.array_equal(own.attach(name), table())
        y = own.attach(name)
    assert not files(name)
    assert np.array_equal(y, table())


def test_a_session_ends_no_name_of_another(session, name):
    with synk.Session(1, verbose=False) as own:
        own.data(table(), shm_name=name).free_memory()
        x = session.data(table(), shm_name=name)
    assert files(name)
    x.free_memory()


def test_a_name_that_was_replaced_is_left_alone(session, name):
    x = session.data(table(), shm_name=name)
    os.unlink(f"/dev/shm{name}")
    with plain(name):
        x.free_memory()
        assert files(name)


def test_the_keeper_ends_with_the_last_name(session, name):
    x, y = (session.data(table(), shm_name=f"{name}{end}") for end in "xy")
    keeper = named._names._keeper._process
    x.free_memory()
    assert keeper.poll() is None
    y.free_memory()
    assert keeper.poll() == 0


def test_a_keeper_that_was_killed_is_replaced(session, name):
    x = session.data(table(), shm_name=name)
    first = named._names._keeper._process
    first.kill()
    first.wait()
    assert not named.sweep()  # the name is this program's as before
    y = session.data(table(), shm_name=f"{name}-2")
    assert named._names._keeper._process is not first
    x.free_memory()
    y.free_memory()
    assert wait_until(lambda: not files(name))
