"""Functions of numba: one worker compiles them, and the others take over its machine code.

Numba compiles a function when it first sees the types of its arguments: in the workers, in all of them
at the same time.  Here the first worker compiles while the others wait for its machine code.  The code
lies in a file without a name, which the main process holds open, under a file lock, which the kernel
releases when its holder dies: nothing is left behind, and nobody waits for a dead worker.  On two busy
cores a first call takes 11 s instead of 15 s with 2 workers, and 19 s instead of 29 s with 8.

Numba's own cache on the disk confuses functions that differ only in the values of globals.  So it is
used only if the user asks for it (``cache=True``).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import pickle
import struct
import sys
from collections.abc import Iterator
from typing import Any

from numba.core import bytecode, caching, compiler, serialize
from numba.core.compiler_lock import global_compiler_lock
from numba.np.ufunc.dufunc import DUFunc

from .. import here
from ..machine import announcing
from ..memory.interrupts import atomic

_LENGTH = struct.Struct("q")


class Compilations:
    """The main process's side: the file of one session, and a number for every function in it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("synkro-numba", os.MFD_CLOEXEC)
        self._numbers = itertools.count()

    def reduced(self, fn: Any) -> Any:
        """How the function *fn*, made by ``@njit``, ``@vectorize`` or ``@cuda.jit``, is pickled."""
        if not isinstance(fn, DUFunc) and "sigs" not in (states := fn._reduce_states()):
            return _rebuilt_for_gpus, (type(fn), states)
        place = f"/proc/{os.getpid()}/fd/{self._file}"
        cache = fn._dispatcher.cache if isinstance(fn, DUFunc) else fn._cache
        on_disk = isinstance(cache, caching.FunctionCache)  # the user has said cache=True
        return _rebuilt, (type(fn), fn._reduce_states(), on_disk, place, next(self._numbers))

    def close(self) -> None:
        os.close(self._file)


def _rebuilt_for_gpus(cls: Any, states: dict[str, Any]) -> Any:
    """The kernel on a worker, which compiles it when it first launches it."""
    return cls._rebuild(**states)


def _rebuilt(cls: Any, states: dict[str, Any], on_disk: bool, place: str, number: int) -> Any:
    """The function on a worker."""
    if issubclass(cls, DUFunc):
        _share(states["dispatcher"], "cache", on_disk, place, number)
        return cls._rebuild(**states)
    signatures, can_compile = states["sigs"], states["can_compile"]
    fn = cls._rebuild(**{**states, "sigs": [], "can_compile": True})
    if "compile" not in vars(fn):  # else it is one that came before, found again by numba
        _share(fn, "_cache", on_disk, place, number)
        for signature in signatures:
            fn.compile(signature)
        fn._can_compile = can_compile
    return fn


def _share(dispatcher: Any, attribute: str, on_disk: bool, place: str, number: int) -> None:
    """Let *dispatcher*, whose cache is its *attribute*, compile while no other worker does."""
    file = _opened(place)
    name = dispatcher.py_func.__name__
    compile_alone = dispatcher.compile

    def compile_or_take(*args: Any, **kwargs: Any) -> Any:
        with atomic, global_compiler_lock, file.locked():  # Ctrl-C must not leave the lock behind
            return compile_alone(*args, **kwargs)

    dispatcher.compile = compile_or_take
    setattr(dispatcher, attribute, _Cache(file, number, name))
    if on_disk:
        with contextlib.suppress(RuntimeError):  # there is no folder to write to
            dispatcher.enable_caching()


class _File:
    """The file on a worker: records of a key and machine code, each preceded by its length."""

    def __init__(self, place: str) -> None:
        # symbols of machine code have these numbers: no two workers may use the same
        bytecode.FunctionIdentity._unique_ids = itertools.count(os.getpid() << 20)
        self._file = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        self._end = 0
        self._depth = 0  # of compilations, which nest; the outermost one unlocks the file
        self._found: dict[Any, bytes | None] = {}
        self._announcing = False
        self._announced = contextlib.ExitStack()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the file, which keeps workers apart; numba's own lock keeps threads apart."""
        self.lock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._announced.close()
                self.unlock()

    def announce(self, name: str) -> None:
        """Say after a while that the function *name* is compiled, unless one that calls it is told."""
        if not self._announcing:
            self._announcing = True
            self._announced.callback(setattr, self, "_announcing", False)
            self._announced.enter_context(announcing(_say, f"Synkro is compiling {name!r}..."))

    def lock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def look(self, key: Any) -> tuple[bool, bytes | None]:
        """Whether *key* was compiled, and the machine code, or None if it cannot be handed over."""
        size = os.fstat(self._file).st_size
        while self._end + _LENGTH.size <= size:
            (length,) = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, self._end))
            start = self._end + _LENGTH.size
            if not length or start + length > size:  # its writer died
                break
            found, code = pickle.loads(os.pread(self._file, length, start))
            self._found[found] = code
            self._end = start + length
        return key in self._found, self._found.get(key)

    def add(self, key: Any, code: bytes | None) -> None:
        """Hand the *code* of *key* to the other workers; the lock is held."""
        record = serialize.dumps((key, code))
        os.ftruncate(self._file, self._end)  # what a writer that died has left
        os.pwrite(self._file, record, self._end + _LENGTH.size)
        os.pwrite(self._file, _LENGTH.pack(len(record)), self._end)  # last: it makes the record valid


_opened = functools.cache(_File)


def _say(text: str) -> None:
    if here.rank is not None and here.rank.verbose:
        print(text, file=sys.stderr)


class _Cache(caching.NullCache):  # type: ignore[misc]
    """What numba asks before it compiles a function, and tells afterwards: one of its caches."""

    def __init__(self, file: _File, number: int, name: str) -> None:
        self._file = file
        self._number = number
        self._name = name

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        known, code = self._file.look((self._number, str(signature)))
        if code is not None:
            target_context.refresh()
            return compiler.CompileResult._rebuild(target_context, *pickle.loads(code))
        if known:  # its code is tied to the process that compiled it: all workers compile, at once
            self._file.unlock()
        else:
            self._file.announce(self._name)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        key = (self._number, str(signature))
        self._file.lock()
        if self._file.look(key)[0]:
            return
        lifted = any(not part.can_cache for part in result.lifted)
        bound = lifted or result.library.has_dynamic_globals  # to addresses in this process
        self._file.add(key, None if bound else serialize.dumps(result._reduce()))
