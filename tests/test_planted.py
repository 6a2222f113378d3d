"""Memory with a name that somebody else may have written: other users, other programs, any bytes."""

import contextlib
import fcntl
import itertools
import os
import pathlib
import struct

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.limits import descriptors
from support.named import files
from support.sessions import lasting
from synkro.memory import named

pytest.importorskip("posix_ipc", reason="needs posix_ipc, which has no wheel for this Python")

pytestmark = [pytest.mark.quick, pytest.mark.one_host]

session = lasting(1)
NOBODY = 65534


def path_of(name, semaphore=""):
    return pathlib.Path("/dev/shm", f"sem.{name[1:]}{semaphore}" if semaphore else name[1:])


@pytest.fixture
def of_another(monkeypatch):
    """Gives a file to another user, or makes another user of this one."""

    def give(path):
        if os.geteuid():
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        else:
            os.chown(path, NOBODY, NOBODY)

    return give


@contextlib.contextmanager
def planted(name, content, mode=0o600):
    """Memory with this *content*, which its maker holds, as a living program would."""
    path = path_of(name)
    path.write_bytes(content)
    try:
        path.chmod(mode)
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    finally:
        path.unlink()


@contextlib.contextmanager
def in_the_way(path, make):
    """What *make* makes lies there for a while, and is left as it is."""
    make(path)
    try:
        yield
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def header(shape=(3,), dtype=b"<f8", slots=0, slot_bytes=0, offset=4096):
    """That of memory with a name, as another program writes it."""
    written = bytearray(4096)
    written[:8] = b"SYNKSHM\0"
    fields = 1, int(bool(slots)), offset, slots, slot_bytes, len(shape)
    struct.pack_into("<IIQQQQ", written, 8, *fields)
    struct.pack_into(f"<{len(shape)}Q", written, 48, *shape)
    written[1024 : 1024 + len(dtype)] = dtype
    return bytes(written)


# ── whose it is ──────────────────────────────────────────────────────────────────────────────────────


def test_memory_of_another_user_is_not_opened(session, name, of_another):
    x = session.data(np.arange(3.0), shm_name=name)
    of_another(path_of(name))
    for arguments in ({}, {"writable": True}, {"dtype": "f8", "shape": 3, "offset": 4096}):
        with pytest.raises(synk.InvalidValue, match=r"belongs to another user.*any_owner=True"):
            session.attach(name, **arguments)
    assert session.attach(name, any_owner=True)[2] == 2
    x.free_memory()


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_memory_that_others_can_write_is_not_opened(session, name, mode):
    with planted(name, header() + bytes(24), mode):
        for arguments in ({}, {"dtype": "f8", "shape": 3, "offset": 4096}):
            with pytest.raises(synk.InvalidValue, match=rf"mode is 0{mode:o}\): .*600 /dev/shm{name}"):
                session.attach(name, **arguments)
        assert session.attach(name, any_owner=True)[2] == 0


def test_memory_that_others_can_only_read_is_opened(session, name):
    with planted(name, header() + bytes(24), 0o644):
        assert session.attach(name)[2] == 0


def test_a_ring_of_another_user_gets_no_frame(session, name, of_another):
    with session.ring(name, slots=2, shape=(3,), timeout=30) as ring:
        of_another(path_of(name))
        with pytest.raises(synk.InvalidValue, match=r"belongs to another user.*any_owner=True"):
            synk.ring(name)
        with synk.ring(name, any_owner=True) as writer:
            writer.write(np.ones(3))
        assert next(ring)[:].sum() == 3


@pytest.mark.parametrize("semaphore", [".free", ".full"])
def test_semaphores_of_another_user_are_not_opened(session, name, of_another, semaphore):
    with session.ring(name, slots=2, shape=(3,)):
        path_of(name, semaphore).chmod(0o666)
        with pytest.raises(synk.InvalidValue, match=r"a semaphore of .* can be written by"):
            synk.ring(name)
        path_of(name, semaphore).chmod(0o600)
        of_another(path_of(name, semaphore))
        with pytest.raises(synk.InvalidValue, match=r"a semaphore of .* belongs to another"):
            synk.ring(name)
        synk.ring(name, any_owner=True).close()


def test_the_reader_of_a_ring_makes_it(session, name):
    with pytest.raises(synk.InvalidValue, match="any_owner= is for the program that opens a ring"):
        synk.ring(name, slots=2, shape=3, any_owner=True)
    with pytest.raises(synk.InvalidType, match="any_owner must be"):
        session.attach(name, any_owner="yes")
    with pytest.raises(synk.InvalidType, match="any_owner must be"):
        synk.ring(name, any_owner="yes")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "is a pipe, and no memory|No such device"),
        (os.mkdir, "is a folder, and no memory|Is a directory"),
        (lambda path: path.symlink_to("/etc/passwd"), "it is a symbolic link"),
        (lambda path: path.touch(), "is empty"),
    ],
    ids=["pipe", "folder", "link", "empty"],
)
def test_what_is_no_memory_is_not_waited_for(session, name, make, says):
    with in_the_way(path_of(name), make):
        for opening in (session.attach, synk.ring):
            with pytest.raises(synk.InvalidValue, match=says):
                opening(name)


@pytest.mark.parametrize("semaphore", [".free", ".full"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "is a pipe, and no memory"),
        (os.mkdir, "is a folder, and no memory"),
        (lambda path: path.symlink_to(path), "is a symbolic link, and no memory"),
        (lambda path: path.touch(0o600), "has 0 bytes, and a semaphore has 32"),
    ],
    ids=["pipe", "folder", "link", "empty"],
)
def test_what_is_no_semaphore_is_not_taken_for_one(session, name, semaphore, make, says):
    with session.ring(name, slots=2, shape=(3,)):
        path = path_of(name, semaphore)
        path.unlink()
        with (
            in_the_way(path, make),
            pytest.raises(synk.InvalidValue, match=f"a semaphore of .*{path}, {says}"),
        ):
            synk.ring(name)


@pytest.mark.parametrize("semaphore", [".free", ".full"])
def test_a_ring_that_gets_no_semaphores_leaves_no_name(session, name, semaphore):
    with (
        in_the_way(path_of(name, semaphore), os.mkdir),
        pytest.raises(synk.InvalidValue, match=rf"cannot be had: .*Remove .*{semaphore}.*another name"),
    ):
        session.ring(name, slots=2, shape=(3,))
    session.ring(name, slots=2, shape=(3,)).close()


def test_a_folder_in_the_place_of_a_semaphore_keeps_no_name(session, name):
    ring = session.ring(name, slots=2, shape=(3,))
    path = path_of(name, ".free")
    path.unlink()
    with in_the_way(path, os.mkdir):
        ring.close()
        assert files(name) == [path.name]


def test_a_semaphore_whose_count_is_full_loses_no_frame(session, name):
    import posix_ipc

    with session.ring(name, slots=2, shape=(3,), timeout=30) as ring, synk.ring(name) as writer:
        for number in range(5):
            for semaphore in (".full", ".free"):
                with path_of(name, semaphore).open("r+b") as file:
                    file.write(
                        struct.pack("=I", posix_ipc.SEMAPHORE_VALUE_MAX)
                    )  # as on x86-64 and arm64
            assert writer._signals.full.value == posix_ipc.SEMAPHORE_VALUE_MAX
            writer.write(np.full(3, number))
            assert next(ring)[:].sum() == 3 * number


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────

LIES = [
    ((2**62, 0, 3), b"<f8", "field 'shape' is .*4611686018427387904, 0, 3"),
    ((2**63, 0), b"<f8", "field 'shape' is"),
    ((2**64 - 1,) * 63 + (0,), b"|u1", "field 'shape' is .{,80} one that an array can have"),
    ((3,), b"float8_e5m2", "field 'dtype' is 'float8_e5m2'"),
    ((3,), b"(2,3)f8", "field 'dtype' is"),
    ((3,), b"S0", "field 'dtype' is"),
    ((3,), b"-" * 1000 + b"1", "field 'dtype' is"),
    ((3,), b"[" + b"-" * 1000 + b"1]", "field 'dtype' is"),
    ((3,), b"[('a', '<f8', (%d,))]" % 2**70, "field 'dtype' is"),
    ((3,), b"[('a', '|V2000000000')]", r"tells of \d+ bytes|'slot_bytes' is"),
    ((3,), b"[7]", "field 'dtype' is"),
]


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize(("shape", "dtype", "says"), LIES)
def test_headers_that_no_array_can_have(session, name, shape, dtype, says, slots):
    opening = synk.ring if slots else session.attach
    content = header(shape, dtype, slots, 64 * slots) + bytes(4096)
    with planted(name, content), pytest.raises(synk.InvalidValue, match=says):
        opening(name)


@pytest.mark.parametrize("slot_bytes", [0, 1, 63, 65, 100])
def test_slots_lie_apart(name, slot_bytes):
    content = header((0,), b"<f8", 10**10, slot_bytes) + bytes(4096)
    says = f"'slot_bytes' is {slot_bytes}, and has to be a multiple of 64"
    with planted(name, content), pytest.raises(synk.InvalidValue, match=says):
        synk.ring(name)


def test_a_ring_of_more_slots_than_memory(session, name):
    slots = 1 << 32
    with session.ring(name, slots=1, shape=(1,), timeout=30) as ring:
        path = path_of(name)
        os.truncate(path, 4096 + 64 * slots)  # which takes no memory
        with path.open("r+b") as file:
            file.seek(24)
            file.write(struct.pack("<Q", slots))
        with synk.ring(name) as writer:
            assert writer.slots == slots
            writer.write([3])
        assert next(ring)[0] == 3


EDGES = [(2**power + more) % 2**64 for power in (12, 31, 32, 62, 63, 64) for more in (-1, 0, 64)]
numbers = st.one_of(st.integers(0, 70), st.sampled_from(EDGES))
PAIRS = "[('a', '<f8'), ('b', '|S3')]"
DTYPES = ["<f8", "|u1", "S3", PAIRS, "bfloat16", "V8", "M8[ns]", "O", "T", "i4,i4"]
headers = st.builds(
    header,
    shape=st.lists(numbers, max_size=64),
    dtype=st.one_of(st.sampled_from(DTYPES).map(str.encode), st.binary(max_size=1024)),
    slots=st.one_of(st.just(0), numbers),
    slot_bytes=st.one_of(st.just(64), numbers),
    offset=st.one_of(st.just(4096), numbers),
)
changes = st.lists(st.tuples(st.integers(0, 4095), st.binary(min_size=1, max_size=16)), max_size=4)
counter = itertools.count()


@examples(1000)
@given(written=headers, changes=changes, size=st.integers(0, 9000), cut=st.integers(0, 40))
def test_any_bytes_are_an_array_or_an_error_of_ours(session, written, changes, size, cut):
    written = bytearray(written)
    for at, new in changes:
        written[at : at + len(new)] = new
    content = bytes(written[: None if cut else size]) + bytes(size)
    name = f"/synkro-test-{os.getpid()}-{next(counter)}"
    with planted(name, content or b"\0"):
        with contextlib.suppress(synk.InvalidValue):
            data = session.attach(name)
            assert data[...].nbytes <= size
            assert len(repr(data)) < 1000
        with pytest.raises(synk.InvalidValue):
            synk.ring(name)  # which has no semaphores, even where all else is right


# ── descriptors that have run out ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("left", range(8))
def test_too_few_descriptors_are_told_however_many_are_left(session, name, left):
    with session.ring(f"{name}-2", slots=1, shape=3), descriptors(left):
        for make in (
            lambda: session.data(np.ones(3), shm_name=name).free_memory(),
            lambda: session.ring(name, slots=1, shape=3).close(),
            lambda: synk.ring(f"{name}-2").close(),
        ):
            told = pytest.raises(synk.SharedMemoryError, match="ulimit -n")
            with contextlib.suppress(pytest.fail.Exception), told:  # it may work
                make()


def test_no_descriptor_at_all(session, name):
    x = session.data(np.ones(3), shm_name=name)
    with session.ring(f"{name}-2", slots=1, shape=3), descriptors(0):
        for make in (
            lambda: session.data(np.ones(3), shm_name=f"{name}-3"),
            lambda: session.ring(f"{name}-3", slots=1, shape=3),
            lambda: session.attach(name),
            lambda: synk.ring(f"{name}-2"),
        ):
            with pytest.raises(synk.SharedMemoryError, match="ulimit -n"):
                make()
    x.free_memory()
    assert named.sweep() == []
