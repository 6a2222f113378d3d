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


WRONG = {  # what is in the way, and what is said of it as memory, and as a semaphore
    "pipe": (os.mkfifo, "is a pipe, and no memory|No such device", "is a pipe, and no memory"),
    "folder": (os.mkdir, "is a folder, and no memory|Is a directory", "is a folder, and no memory"),
    "link": (
        lambda path: path.symlink_to("/etc/passwd"),
        "it is a symbolic link",
        "is a symbolic link, and no memory",
    ),
    "empty": (lambda path: path.touch(0o600), "is empty", "has 0 bytes, and a semaphore has 32"),
}


def header(shape="(3,)", descr="'<f8'", order=False):
    """That of an ``.npy`` file, as another program writes it."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", 4086) + text[:4085].ljust(4085) + b"\n"


def tail(nbytes=24, slots=0, slot_bytes=0, kind=None, version=2):
    """The last bytes, as another program writes them."""
    kind = int(bool(slots)) if kind is None else kind
    written = b"SYNKSHM\0" + struct.pack("<II16sQQQ", version, kind, b"", nbytes, slots, slot_bytes)
    return written.ljust(192, b"\0")


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


def test_where_the_rights_do_not_suffice_another_way_is_told_if_there_is_one(session, name, monkeypatch):
    def refused(path, *args):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refused)
    for opening, ends in (
        (
            lambda: session.attach(name),
            "cannot be read by this one: run both programs as the same user.",
        ),
        (lambda: session.attach(name, writable=True), "the same user, or leave writable= out."),
        (lambda: synk.ring(name), "cannot be written by this one: run both programs as the same user."),
    ):
        with pytest.raises(synk.InvalidValue) as error:
            opening()
        assert str(error.value).endswith(ends)


def test_the_reader_of_a_ring_makes_it(session, name):
    with pytest.raises(synk.InvalidValue, match="any_owner= is for the program that opens a ring"):
        synk.ring(name, slots=2, shape=3, any_owner=True)
    with pytest.raises(synk.InvalidType, match="any_owner must be"):
        session.attach(name, any_owner="yes")
    with pytest.raises(synk.InvalidType, match="any_owner must be"):
        synk.ring(name, any_owner="yes")


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_memory_is_not_waited_for(session, name, wrong):
    make, says, _ = WRONG[wrong]
    with in_the_way(path_of(name), make):
        for opening in (session.attach, synk.ring):
            with pytest.raises(synk.InvalidValue, match=says):
                opening(name)


@pytest.mark.parametrize("semaphore", [".free", ".full"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_semaphore_is_not_taken_for_one(session, name, semaphore, wrong):
    make, _, says = WRONG[wrong]
    with session.ring(name, slots=2, shape=(3,)):
        path = path_of(name, semaphore)
        path.unlink()
        told = pytest.raises(synk.InvalidValue, match=f"a semaphore of .*{path}, {says}")
        with in_the_way(path, make), told:
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

    count = struct.pack("=I", posix_ipc.SEMAPHORE_VALUE_MAX)  # as on x86-64 and arm64
    with session.ring(name, slots=2, shape=(3,), timeout=30) as ring, synk.ring(name) as writer:
        for number in range(5):
            for semaphore in (".full", ".free"):
                with path_of(name, semaphore).open("r+b") as file:
                    file.write(count)
            assert writer._signals.full.value == posix_ipc.SEMAPHORE_VALUE_MAX
            writer.write(np.full(3, number))
            assert next(ring)[:].sum() == 3 * number


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────

CANNOT = "cannot be read: |field '|there are"
LIES = [
    ("(4611686018427387904, 0, 3)", "'<f8'", "field 'shape' is .*4611686018427387904, 0, 3"),
    ("(9223372036854775808, 0)", "'<f8'", "field 'shape' is"),
    (repr((2**64 - 1,) * 63 + (0,)), "'|u1'", "field 'shape' is .{,80} one that an array can have"),
    ("(3,)", "'float8_e5m2'", "field 'descr' is float8_e5m2|cannot be read"),
    ("(3,)", "'(2,3)f8'", "field 'descr' is"),
    ("(3,)", "'S0'", "field 'descr' is"),
    ("(3,)", "'" + "-" * 1000 + "1'", CANNOT),
    ("(3,)", "[" + "-" * 1000 + "1]", CANNOT),
    ("(3,)", f"[('a', '<f8', ({2**70},))]", CANNOT),
    ("(3,)", "[('a', '|V2000000000')]", "from byte 4096 to byte 6000004096, and there are"),
    ("(3,)", "[7]", CANNOT),
    ("(3.0,)", "'<f8'", CANNOT),
    ("(True, 3)", "'<f8'", r"field 'shape' is \(True, 3\), and has to be one that an array can have"),
    ("3", "'<f8'", CANNOT),
    ("(3,)", "'O'", "field 'descr' is object"),
    ("(3,), **{}", "'<f8'", CANNOT),
    ("(3,)", "__import__('os').abort()", CANNOT),
]


@pytest.mark.parametrize("behind", [b"", tail()], ids=["of a program", "of ours"])
@pytest.mark.parametrize(("shape", "descr", "says"), LIES)
def test_headers_that_no_array_can_have(session, name, shape, descr, says, behind):
    content = header(shape, descr) + bytes(4096) + behind
    says = f"{says}|field 'nbytes'" if behind else says
    with planted(name, content), pytest.raises(synk.InvalidValue, match=says):
        session.attach(name)


@pytest.mark.parametrize(
    ("shape", "descr"),
    [
        ("(2,)", "[('frame', '<f8', (3,))]"),
        ("(2,)", "[('frame', '<f8', (3,)), ('', '|V41')]"),
        ("(2, 2)", "[('frame', '<f8', (3,)), ('', '|V40')]"),
        ("(0,)", "[('frame', '<f8', (3,)), ('', '|V40')]"),
        ("(2,)", "[('frames', '<f8', (3,)), ('', '|V40')]"),
        ("(2,)", "[('a', 'i8'), ('frame', '<f8', (3,)), ('', '|V32')]"),
        ("(2,)", "'<f8'"),
    ],
)
def test_slots_are_records_apart(name, shape, descr):
    content = header(shape, descr) + bytes(4096) + tail(24, 2, 64)
    says = "has to be that of slots of a multiple of 64 bytes, with a field 'frame'"
    with planted(name, content), pytest.raises(synk.InvalidValue, match=says):
        synk.ring(name)


def test_a_ring_of_more_slots_than_memory(session, name):
    slots = 1 << 32
    with session.ring(name, slots=1, shape=(1,), timeout=30) as ring:
        path = path_of(name)
        nbytes = 4096 + 64 * slots
        with path.open("r+b") as file:
            file.write(header(f"({slots},)", "[('frame', '<f8', (1,)), ('', '|V56')]"))
            os.truncate(path, nbytes + 192)  # which takes no memory
            file.seek(nbytes)
            file.write(tail(8, slots, 64))
        with synk.ring(name) as writer:
            assert writer.slots == slots
            writer.write([3])
            assert writer._segment.base[4096:4104].view("f8")[0] == 3
        del ring


EDGES = [(2**power + more) % 2**64 for power in (12, 31, 32, 62, 63, 64) for more in (-1, 0, 64)]
numbers = st.one_of(st.integers(-1, 70), st.sampled_from(EDGES))
PAIRS = "[('a', '<f8'), ('b', '|S3')]"
FRAMES = "[('frame', '<f8', (3,)), ('', '|V40')]"
DESCRS = [repr(code) for code in ("<f8", "|u1", "S3", "bfloat16", "V8", "M8[ns]", "O", "T", "i4,i4")]
headers = st.builds(
    header,
    shape=st.lists(numbers, max_size=64).map(lambda each: repr(tuple(each))),
    descr=st.one_of(st.sampled_from([*DESCRS, PAIRS, FRAMES]), st.text(max_size=1024).map(ascii)),
    order=st.booleans(),
)
tails = st.one_of(
    st.just(b""),
    st.builds(
        tail,
        nbytes=numbers.map(abs),
        slots=st.one_of(st.just(0), numbers.map(abs)),
        slot_bytes=st.one_of(st.just(64), numbers.map(abs)),
        kind=st.integers(0, 2),
        version=st.sampled_from([2, 2, 2, 1, 3]),
    ),
)
changes = st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=16)), max_size=4)
counter = itertools.count()


@examples(1000)
@given(written=headers, behind=tails, changes=changes, size=st.integers(0, 9000), cut=st.integers(0, 40))
def test_any_bytes_are_an_array_or_an_error_of_ours(session, written, behind, changes, size, cut):
    written, behind = bytearray(written), bytearray(behind)
    for at, new in changes:
        changed = written if at % 2 or not behind else behind
        changed[at // 2 : at // 2 + len(new)] = new
    content = bytes(written[: None if cut else size]) + bytes(size) + bytes(behind)
    name = f"/synkro-test-{os.getpid()}-{next(counter)}"
    with planted(name, content or b"\0"):
        with contextlib.suppress(synk.InvalidValue):
            data = session.attach(name)
            assert data[...].nbytes <= len(content)
            assert len(repr(data)) < 1000
        with pytest.raises(synk.InvalidValue) as error:
            synk.ring(name)  # which has no semaphores, even where all else is right
        assert len(str(error.value)) < 600


# ── descriptors that have run out ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("left", range(8))
def test_too_few_descriptors_are_told_however_many_are_left(session, name, left):
    may_work = [pytest.fail.Exception] if left else []
    x = session.data(np.ones(3), shm_name=name)
    with session.ring(f"{name}-2", slots=1, shape=3), descriptors(left):
        for make in (
            lambda: session.data(np.ones(3), shm_name=f"{name}-3").free_memory(),
            lambda: session.ring(f"{name}-3", slots=1, shape=3).close(),
            lambda: session.attach(name),
            lambda: synk.ring(f"{name}-2").close(),
        ):
            told = pytest.raises(synk.SharedMemoryError, match="ulimit -n")
            with contextlib.suppress(*may_work), told:
                make()
    x.free_memory()
    assert named.sweep() == []
