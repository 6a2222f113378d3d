"""What is said where the cause is an unusual one: no descriptor left, too deep, too long."""

import contextlib
import errno
import gc
import io
import os
import re
import sys
import threading

import numpy as np
import pytest

import synkro as synk
from synkro.errors import line_of, shortened, with_article

pytestmark = [pytest.mark.quick, pytest.mark.counted_once]

X = np.arange(6.0)


class NeedsFile:
    """Pickle opens a file for it, and none is left."""

    def __init__(self, number=errno.EMFILE, wrapped=False):
        self.number, self.wrapped = number, wrapped

    def __getstate__(self):
        error = OSError(self.number, os.strerror(self.number))
        if self.wrapped:
            raise RuntimeError("no state") from error
        raise error


def one_argument(fn):
    return synk.function(fn, bcast_inputs="y", outputs=None)


WAYS = {  # of calls that have to pickle something
    "a function": lambda obj: synk.function(lambda: obj, outputs=None)(),
    "an argument": lambda obj: one_argument(lambda y: 1)(obj),
    "a part of one": lambda obj: one_argument(lambda y: 1)([obj]),
    "a row": lambda obj: synk.function(lambda y: 1, outputs=None)([obj, obj]),
    "an item": lambda obj: synk.map(lambda item: 1, [obj]),
    "what tasks share": lambda obj: synk.map(lambda item, y: 1, [1], common={"y": obj}),
}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_descriptor_for_a_pickle_is_not_the_objects_fault(two, way, wrapped, number):
    advice = r"cannot be (pickled|sent).*raise the limit \(ulimit -n\)"
    with pytest.raises(synk.SharedMemoryError, match=advice):
        WAYS[way](NeedsFile(number, wrapped))


def test_another_error_is_the_objects_fault(two):
    with pytest.raises(synk.InvalidType, match="cannot be pickled: PermissionError"):
        WAYS["an argument"](NeedsFile(errno.EACCES))


@pytest.mark.parametrize("way", ["a result", "a result of a task"])
def test_no_descriptor_on_a_worker(two, way):
    def result(*_):
        return NeedsFile()

    call = synk.function(result, outputs=None) if way == "a result" else lambda: synk.map(result, [1])
    with pytest.raises(synk.SharedMemoryError, match=r"cannot be pickled .*ulimit -n"):
        call()


# ── what is nested too deeply ────────────────────────────────────────────────────────────────────────


def nested(depth=3000, kind="list", inmost=1.0):
    deep = inmost
    for _ in range(depth):
        deep = {"a": deep} if kind == "dict" else [deep]
    return deep


def the_first(one, other):
    return one


DEPTHS = [200, 300, 500, 900, 3000]
KINDS = ["list", "dict"]


DEEP_WAYS = {
    **WAYS,
    "what is submitted": lambda deep: one_argument(lambda y: 1).submit(deep).result(),
    "what runs alone": lambda deep: one_argument(lambda y: synk.all_reduce(1)).as_serial(deep),
    "outputs=": lambda deep: synk.function(lambda x: x, outputs=deep),
}


def freed(deep):
    """Level by level: Python frees what is nested by calls."""
    while isinstance(deep, list | dict):
        deep = deep[0] if isinstance(deep, list) else deep["a"]


TOO_DEEP = r" is nested too deeply to be pickled, or holds itself: give .*list\.$"


@contextlib.contextmanager
def told_or_done(error, surely):
    """What is not taken apart may be deeper: how deep, depends on Python."""
    told = None
    try:
        yield
    except error as caught:
        told = str(caught)
    assert re.search(TOO_DEEP, told or "") or not (told or surely)


@pytest.fixture
def usual_limit():
    """Python's own: other tests may have raised it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", DEEP_WAYS)
def test_what_is_nested_too_deeply_is_told_alike(two, usual_limit, way, kind, depth):
    deep = nested(depth, kind, inmost="sum" if way == "outputs=" else np.ones(2))
    apart = way in ("an argument", "a part of one", "what is submitted", "what runs alone", "outputs=")
    with told_or_done(synk.InvalidValue, surely=apart):
        DEEP_WAYS[way](deep)
    freed(deep)
    assert synk.function(lambda x: x.sum(), outputs="sum")(X) == 15


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [None, "sum", "mean", "gather", "keep", the_first, "a result"])
def test_what_is_returned_and_nested_too_deeply_is_told_alike(two, usual_limit, outputs, kind, depth):
    def fn(*_):
        return nested(depth, kind)

    with told_or_done(synk.OutputError, surely=outputs in ("sum", "mean", "keep")):
        if outputs == "a result":
            synk.map(fn, [1])
        else:
            synk.function(fn, outputs=outputs)()
    assert synk.function(lambda x: x.sum(), outputs="sum")(X) == 15


class Unsendable:
    """A key that cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()


def test_keys_that_cannot_be_pickled_are_told(two):
    def returns(x):
        return {Unsendable(): x.sum()}

    told = r"the function 'returns' .* keys that cannot be pickled: T"
    with pytest.raises(synk.OutputError, match=told):
        synk.function(returns, outputs="sum")(X)
    takes = synk.function(lambda y: 1, bcast_inputs="y", outputs=None)
    with pytest.raises(synk.InvalidType, match="keys that cannot be pickled: TypeError"):
        takes({Unsendable(): X})
    assert takes({(1, "a"): X}) == [1, 1]


# ── results that stay ────────────────────────────────────────────────────────────────────────────────


class Holder:
    def __init__(self, held):
        self.held = held


FILES = {
    "text": lambda *_: io.TextIOWrapper(io.FileIO(os.devnull)),
    "bytes": lambda *_: io.BufferedReader(io.FileIO(os.devnull)),
    "inside": lambda *_: Holder([io.FileIO(os.devnull)]),
    "standard": lambda *_: sys.stdout,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("file", FILES)
def test_a_file_is_no_result_as_it_is_no_item(two, file):
    refused = pytest.raises(
        synk.OutputError, match=r"cannot be pickled.*: TypeError: cannot send the open file <_(io|Lines)"
    )
    for outputs in (None, lambda one, other: one):
        with refused:
            synk.function(FILES[file], outputs=outputs)()
    with refused:
        synk.map(FILES[file], [1])
    with pytest.raises(synk.InvalidType, match="cannot send the open file"):
        synk.map(print, [FILES[file]()])
    gc.collect()  # the file that the error holds is closed here, where nobody minds


def test_files_in_memory_are_results(two):
    def made(item):
        return io.StringIO(item), io.BytesIO(item.encode())

    ((text, binary),) = synk.map(made, ["kept"])
    assert (text.getvalue(), binary.getvalue()) == ("kept", b"kept")


# ── settings of Python ───────────────────────────────────────────────────────────────────────────────


def deep(levels):
    return levels and 1 + deep(levels - 1)


def test_how_deep_calls_may_nest_goes_along(two):
    f = synk.function(deep, bcast_inputs="levels", outputs="max")
    before = sys.getrecursionlimit()
    assert f(10) == 10
    try:
        for limit in (3 * before, 4 * before):
            sys.setrecursionlimit(limit)
            assert f(2 * before) == 2 * before
            assert synk.map(deep, [2 * before]) == [2 * before]
        sys.setrecursionlimit(before)
        with pytest.raises(RecursionError):
            f(2 * before)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.skipif(not hasattr(sys, "set_int_max_str_digits"), reason="an older Python has no limit")
def test_how_many_digits_ints_may_have_goes_along(two):
    digits = synk.function(lambda n: len(str(10**n)), bcast_inputs="n", outputs="max")
    before = sys.get_int_max_str_digits()
    assert digits(100) == 101
    try:
        sys.set_int_max_str_digits(0)
        assert digits(2 * before) == 2 * before + 1
        assert synk.map(lambda n: len(str(10**n)), [2 * before]) == [2 * before + 1]
    finally:
        sys.set_int_max_str_digits(before)
    with pytest.raises(ValueError, match="for integer string conversion"):
        digits(2 * before)


# ── long values in sentences ─────────────────────────────────────────────────────────────────────────


cyclic = [1]
cyclic.append(cyclic)
SHORT = [None, 3, "a  b", b"\0", [], (), set(), {}, [1], (1,), {1}, {1: "x"}, [[1], ({2: ()},)], {3, 4}]


@pytest.mark.parametrize("value", SHORT, ids=repr)
def test_a_short_value_is_shown_as_it_is(value):
    assert line_of(value, 60) == " ".join(repr(value).split())


LONG = [
    "'" * 500,
    b"x" * 500,
    list(range(500)),
    tuple(range(500)),
    {k: k for k in range(500)},
    [["y" * 500]],
]


@pytest.mark.parametrize("value", LONG, ids=lambda value: type(value).__name__)
def test_a_long_value_is_shown_as_it_begins(value):
    assert line_of(value, 60) == repr(value)[:60] + "…"


def test_what_holds_itself_or_is_deep_is_shown_as_it_begins():
    assert line_of(cyclic, 20) == "[1, [1, [1, [1, [1, …"
    assert line_of(nested(), 20) == "[" * 20 + "…"


ARTICLES = {
    "a": ["list", "str", "uint8", "UserDict", "ufunc", "OneHotEncoder"],
    "an": ["int", "async_generator", "OrderedDict", "_Unset", "object", "Update", "Exception"],
}


@pytest.mark.parametrize("article", ARTICLES)
def test_articles(article):
    for noun in ARTICLES[article]:
        assert with_article(noun) == f"{article} {noun}"
        assert shortened(type(noun, (), {"__repr__": lambda _: "it"})()) == f"it, {article} {noun}"


class Loud:
    def __repr__(self):
        raise AssertionError("nobody asks")


@pytest.mark.parametrize("kind", [list, tuple, set, dict.fromkeys])
def test_no_more_is_looked_at_than_is_shown(kind):
    many = kind([*range(1000), Loud()])
    assert len(line_of(many, 60)) == 61
    assert shortened(many).endswith(f"…, a {type(many).__name__}")


@pytest.mark.parametrize("kind", [str, bytes])
def test_long_texts_are_never_shown_whole(two, kind):
    long = kind(1 << 20) if kind is bytes else "long" * (1 << 18)
    for call in (
        lambda: synk.data(long),
        lambda: synk.data([long, long]),
        lambda: synk.function(lambda x: x)(long),
        lambda: synk.function(lambda x: x, outputs=[])(np.ones(3), batch=long),
        lambda: synk.function(long),
        lambda: synk.map(long, [1]),
        lambda: synk.map(lambda x: x, long, common=long),
        lambda: synk.map(lambda x: 1 / 0, [long]),
    ):
        with pytest.raises(synk.SynkroError) as caught:
            call()
        assert len(str(caught.value)) < 1000


LONG_TEXT = "long " * 1000


class Verbose:
    def __repr__(self):
        return LONG_TEXT


class Unpickled:
    def __reduce__(self):
        raise ValueError(LONG_TEXT)


def unmade():
    raise ValueError(LONG_TEXT)


class Unmade:
    def __reduce__(self):
        return unmade, ()


def summed(x):
    return x.sum()


LONG_CALLS = {
    "the name of a function": lambda: synk.function(summed, name=LONG_TEXT)("x"),
    "its call": lambda: synk.function(summed, name=LONG_TEXT)(),
    "its keyword": lambda: synk.function(summed, name=LONG_TEXT)(X, **{LONG_TEXT: 1}),
    "its failure": lambda: synk.function(lambda x: 1 / 0, name=LONG_TEXT)(X),
    "the name of data": lambda: synk.data([None], name=LONG_TEXT),
    "the name of a variable": lambda: synk.shared(X, name=LONG_TEXT).set_value("x"),
    "outputs=": lambda: synk.function(summed, outputs=LONG_TEXT),
    "an object as outputs=": lambda: synk.function(summed, outputs=Verbose()),
    "bcast_inputs=": lambda: synk.function(summed, bcast_inputs=LONG_TEXT),
    "target=": lambda: synk.function(summed, target=LONG_TEXT),
    "num_slices=": lambda: synk.function(summed)(X, num_slices=Verbose()),
    "output_subset=": lambda: synk.function(summed)(X, output_subset=[LONG_TEXT]),
    "devices=": lambda: synk.Session(1, devices=LONG_TEXT),
    "timeout=": lambda: synk.Session(1, timeout=Verbose()),
    "hosts=": lambda: synk.Session(1, hosts=Verbose()),
    "dtype=": lambda: synk.data(X, dtype=LONG_TEXT),
    "shape=": lambda: synk.data(shape=Verbose()),
    "op=": lambda: synk.reduce(synk.shared(X), op=LONG_TEXT),
    "path": lambda: synk.save(Verbose()),
    "common=": lambda: synk.map(summed, [1], common={LONG_TEXT: 1}),
    "an argument": lambda: synk.function(lambda y: 1, bcast_inputs="y")(Unpickled()),
    "an item": lambda: synk.map(abs, [Unpickled()]),
    "a result": lambda: synk.map(lambda item: Unpickled(), [1]),
    "an output": lambda: synk.function(lambda: Unpickled(), outputs=None)(),
    "an argument there": lambda: synk.function(lambda y: 1, bcast_inputs="y")(Unmade()),
    "an item there": lambda: synk.map(abs, [Unmade()]),
    "a result here": lambda: synk.map(lambda item: Unmade(), [1]),
    "an output here": lambda: synk.function(lambda: Unmade(), outputs=None)(),
    "keys of outputs": lambda: synk.function(lambda: {LONG_TEXT: "x"}, outputs="sum")(),
}


@pytest.mark.parametrize("call", LONG_CALLS)
def test_messages_have_a_line_of_what_is_long(two, call):
    with pytest.raises(synk.SynkroError) as caught:
        LONG_CALLS[call]()
    text = str(caught.value)
    assert len(text) < 1000
    assert LONG_TEXT[:50] in text
    assert "…" in text


def test_names_stay_as_they_are(two):
    f = synk.function(summed, outputs="sum", name=LONG_TEXT)
    x, w = synk.data(X, name=LONG_TEXT), synk.shared(X, name=LONG_TEXT)
    assert (f.name, x.name, w.name) == (LONG_TEXT,) * 3
    assert f(x) == 15


def test_the_text_of_a_workers_exception_begins_as_it_does(two):
    def fails():
        raise ValueError(LONG_TEXT)

    begin = "^rank 0 failed in the function 'fails': ValueError: long "
    with pytest.raises(ValueError, match=begin) as caught:
        synk.function(fails)()
    assert len(str(caught.value)) < 2500
    assert str(caught.value.original) == LONG_TEXT


# ── what has to be awaited ───────────────────────────────────────────────────────────────────────────


async def yielding():
    yield 1


async def returning():
    return 1


@pytest.mark.parametrize(
    ("made", "advice"), [(yielding, r"\[x async for x in …\]\.$"), (returning, r"Await it first\.$")]
)
def test_what_has_to_be_awaited_is_told_so(two, made, advice):
    value = made()
    for call in (
        lambda: synk.map(abs, value),
        lambda: synk.map(max, [1], value),
        lambda: synk.imap(abs, value),
        lambda: synk.map(abs, [value]),
        lambda: synk.map(lambda x, y: 1, [1], common={"y": value}),
        lambda: synk.function(lambda x: 1)(value),
        lambda: one_argument(lambda y: 1)(value),
    ):
        with pytest.raises(synk.InvalidType, match=advice):
            call()
    if made is returning:
        value.close()


# ── what ends a test ─────────────────────────────────────────────────────────────────────────────────

ENDS = {"skip": pytest.skip, "fail": pytest.fail, "xfail": pytest.xfail}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_a_test_ends_it_in_a_task_too(two, end):
    def task(_):
        import pytest

        getattr(pytest, end)("the reason")

    for call in (
        lambda: synk.map(task, [1, 2]),
        lambda: list(synk.imap(task, [1])),
        lambda: synk.function(lambda: task(1), outputs=None)(),
        lambda: synk.function(lambda: task(1), outputs=None).submit().result(),
    ):
        with pytest.raises(ENDS[end].Exception) as caught:
            call()
        assert type(caught.value) is ENDS[end].Exception
        assert caught.value.msg == "the reason"
        assert "in task" in str(caught.value.__cause__)
        assert synk.map(abs, [-1]) == [1]
