"""The kinds of objects that functions bring along, and what an object of each kind holds.

What an object holds is a dict, its *contents*: the items of a dict, the attributes of an instance; all
that a list or an array holds is one entry.  Objects inside of it are objects of their own.  Both sides
look at contents: the main process to see what has changed, a worker to take it over.
"""

from __future__ import annotations

import array
import contextlib
import copy
import copyreg
import enum
import functools
import os
import pickle
import re
import sys
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, Protocol

import cloudpickle
import numpy as np

from ..errors import InvalidType, reason
from ..values.foreign import is_generator, is_numba, is_tensor, put_into_tensor, tensor_bytes
from ..values.random import put_state, state_of
from ..values.variable import Variable
from .code import is_own_name
from .refused import stays

Contents = dict[Any, Any]


class _Key:
    """A key that no dict of the user's has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> str:
        return self._name


WHOLE = _Key("WHOLE")
"""The key of the one entry of an object that holds no entries."""

ATTRIBUTES = _Key("ATTRIBUTES")
"""Among the contents of a container, its attributes, if it has some: pairs of a name and a value."""


_GRADIENT = "requires_grad"

CLASS_OF = "__class__"
"""Among the contents of an instance, its class."""


class Digest(NamedTuple):
    """What stands for the contents of an array, or of an object that cannot be looked into."""

    form: Any
    bits: bytes
    nbytes: int = 0


class NumberOf(Protocol):
    """The numbers of objects, by id."""

    def get(self, ident: int, /) -> int | None: ...


class Kind(ABC):
    """How to look at an object, and how to change it.

    Attributes:
        apart: whether entries change one by one.
    """

    apart = False

    @abstractmethod
    def look(self, obj: Any) -> Contents:
        """What *obj* holds."""

    def travelling(self, obj: Any, contents: Contents) -> Contents:
        """What ``change`` needs for these *contents* of *obj*, which lies here."""
        return contents

    def kept(self, obj: Any) -> Contents:
        """What *obj* holds, apart from it: ``change`` puts it back whatever becomes of *obj*."""
        return self.look(obj)

    @abstractmethod
    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        """Put *contents* into *obj*, and delete the entries *gone*."""

    def put_back(self, obj: Any, contents: Contents) -> None:
        """Have *obj* hold *contents*, and nothing else."""
        gone = (key for key in self.look(obj) if key not in contents) if self.apart else ()
        self.change(obj, contents, tuple(gone))


class _Dict(Kind):
    apart = True

    def look(self, obj: Any) -> Contents:
        return dict(obj) | _attributes(obj)

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        own = attributes_of(obj)
        mirrored = own and own is not obj and own.keys() == obj.keys()  # as pickle leaves its own dict
        for key in gone:
            if key in obj:
                del obj[key]
        for key, value in contents.items():  # update() of a Counter adds
            if key is not ATTRIBUTES:
                obj[key] = value
        if mirrored:
            _set_attributes(obj, {ATTRIBUTES: dict(obj)}, gone)
        _set_attributes(obj, contents, gone)

    def put_back(self, obj: Any, contents: Contents) -> None:
        self.change(obj, contents, tuple(self.look(obj)))  # all of them, as a dict has an order


class _Sequence(Kind):
    def look(self, obj: Any) -> Contents:
        return {WHOLE: frozenset(obj) if isinstance(obj, set) else tuple(obj)} | _attributes(obj)

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        _set_attributes(obj, {ATTRIBUTES: (), **contents}, gone)
        new = contents[WHOLE]
        if isinstance(obj, list | bytearray):
            obj[:] = new
        elif isinstance(obj, deque | set):
            obj.clear()
            (obj.extend if isinstance(obj, deque) else obj.update)(new)
        else:
            obj[:] = type(obj)(obj.typecode, new)


def _attributes(obj: Any) -> Contents:
    """The attributes of a container, as an entry; nothing where there are none."""
    own = attributes_of(obj)
    return {ATTRIBUTES: tuple(own.items())} if own and own is not obj else {}


def _set_attributes(obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
    own = attributes_of(obj)
    if own is not None and own is not obj and (ATTRIBUTES in contents or ATTRIBUTES in gone):
        own.clear()
        own.update(contents.get(ATTRIBUTES, ()))


class _Array(Kind):
    def look(self, obj: Any) -> Contents:
        view = np.asarray(obj)
        whole = view if view.flags.c_contiguous else np.ascontiguousarray(view)
        return {WHOLE: _digest((view.shape, view.dtype.str), whole.reshape(-1).view(np.uint8).data)}

    def travelling(self, obj: Any, contents: Contents) -> Contents:
        return {WHOLE: np.array(obj)}

    def kept(self, obj: Any) -> Contents:
        return {WHOLE: np.array(obj)}

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        new = contents[WHOLE]
        if (new.shape, new.dtype) != (obj.shape, obj.dtype):
            raise InvalidType(
                f"an array that functions use has changed in place, from {obj.dtype} of shape "
                f"{obj.shape} to {new.dtype} of shape {new.shape}: make a new one instead."
            )
        frozen = not obj.flags.writeable
        if frozen:
            obj.flags.writeable = True
        obj[...] = new
        if frozen:
            obj.flags.writeable = False


class _Tensor(Kind):
    """One of PyTorch's tensors: its elements, and whether gradients are asked of it."""

    apart = True

    def look(self, obj: Any) -> Contents:
        form, array = tensor_bytes(obj)
        return {WHOLE: _digest(form, array.data), _GRADIENT: obj.requires_grad}

    def travelling(self, obj: Any, contents: Contents) -> Contents:
        return contents | ({WHOLE: obj.detach()} if WHOLE in contents else {})

    def kept(self, obj: Any) -> Contents:
        return {WHOLE: obj.detach().clone(), _GRADIENT: obj.requires_grad}

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        put_into_tensor(obj, contents.get(WHOLE), contents.get(_GRADIENT, obj.requires_grad))


class _Instance(Kind):
    """An object with attributes, which pickle takes as they are."""

    apart = True

    def look(self, obj: Any) -> Contents:
        found = dict(attributes_of(obj) or ())
        for name in slots_of(obj):
            with contextlib.suppress(AttributeError):  # nothing was assigned yet
                found[name] = object.__getattribute__(obj, name)
        found[CLASS_OF] = type(obj)
        return found

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        if contents.get(CLASS_OF, type(obj)) is not type(obj):
            object.__setattr__(obj, CLASS_OF, contents[CLASS_OF])
        own = attributes_of(obj)
        own = {} if own is None else own
        slots = slots_of(obj)
        for name in gone:
            own.pop(name, None)
            if name in slots:
                with contextlib.suppress(AttributeError):
                    object.__delattr__(obj, name)
        for name, value in contents.items():
            if name in slots:
                object.__setattr__(obj, name, value)
            elif name != CLASS_OF:
                own[name] = value


class _Stateful(Kind):
    """An object that says itself what pickle is to take (``__getstate__``): a dict."""

    def look(self, obj: Any) -> Contents:
        try:
            state: Contents = obj.__getstate__()
        except Exception as error:
            raise InvalidType(
                f"an object of type {type(obj).__name__} that functions use can no longer be pickled: "
                f"{reason(error)}"
            ) from error
        return dict(state)

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        INSTANCE.put_back(obj, {})  # what it had computed of the old state goes, too
        _set_state(obj, dict(contents))


class _Class(Kind):
    """A class of the user's."""

    apart = True

    def look(self, obj: Any) -> Contents:
        if "__slotnames__" not in vars(obj):  # which pickle adds with the first instance that it takes
            copyreg._slotnames(obj)  # type: ignore[attr-defined]
        return {
            name: value
            for name, value in vars(obj).items()
            if name not in _CLASS_OWN and not isinstance(value, _DESCRIPTORS)
        }

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        own = vars(obj)
        for name in gone:
            delattr(obj, name)
        for name, value in contents.items():
            if own.get(name, contents) is not value:
                setattr(obj, name, value)


class _Function(Kind):
    """A function of the user's: its code, its defaults, its attributes, and what it closes over."""

    apart = True

    def look(self, obj: Any) -> Contents:
        found: Contents = {name: getattr(obj, name) for name in FUNCTION_PARTS}
        for index, cell in enumerate(obj.__closure__ or ()):
            try:
                found[index] = cell.cell_contents
            except ValueError:  # nothing was assigned yet
                continue
        found.update(obj.__dict__)
        return found

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        for name in gone:
            if isinstance(name, int):
                del obj.__closure__[name].cell_contents
            else:
                obj.__dict__.pop(name, None)
        for name, value in contents.items():
            if isinstance(name, int):
                obj.__closure__[name].cell_contents = value
            else:
                setattr(obj, name, value)


class _Name(Kind):
    """A name in a module."""

    def look(self, obj: Name) -> Contents:
        names: Contents = obj.names
        return {WHOLE: names[obj.name]} if obj.name in names else {}

    def change(self, obj: Name, contents: Contents, gone: tuple[Any, ...]) -> None:
        if WHOLE in contents:
            obj.names[obj.name] = contents[WHOLE]
        else:
            obj.names.pop(obj.name, None)


class _Context(Kind):
    """A ContextVar: its value in the thread that looks."""

    def look(self, obj: ContextVar[Any]) -> Contents:
        try:
            return {WHOLE: obj.get()}
        except LookupError:
            return {}

    def change(self, obj: ContextVar[Any], contents: Contents, gone: tuple[Any, ...]) -> None:
        if WHOLE in contents:
            obj.set(contents[WHOLE])


class _Opaque(Kind):
    """An object that only pickle can look into."""

    def look(self, obj: Any) -> Contents:
        total = _Sum()
        attributes_of(obj)  # which some have from the first look on, and say so in their state
        try:
            _ByName(total, protocol=5, buffer_callback=total.keep).dump(obj)
        except Exception:  # it will not be sent
            total = _Sum()
        return {WHOLE: total.digest._replace(form=type(obj).__qualname__)}

    def travelling(self, obj: Any, contents: Contents) -> Contents:
        way = copyreg.dispatch_table.get(type(obj)) or _CLOUDPICKLE.get(type(obj))
        reduced = obj.__reduce_ex__(4) if way is None else way(obj)
        if isinstance(reduced, str) or not _can_be_made_again(obj, *reduced[:3]):
            raise InvalidType(
                f"an object of type {type(obj).__name__} has changed here since it was sent to the "
                f"workers, and cannot be changed there: make a new one instead."
            )
        made, args, state, items, pairs, put = (*reduced, *[None] * 4)[:6]
        left_out = isinstance(obj, np.ndarray) and not reduces_itself(type(obj), np.ndarray)
        own = _attributes(obj) if left_out else {}
        return {WHOLE: ((made, args), state, list(items or ()), list(pairs or ()), put), **own}

    def can_travel(self, obj: Any) -> bool:
        """Whether another object can take the state of *obj* over."""
        try:
            self.travelling(obj, {})
        except Exception:
            return False
        return True

    def kept(self, obj: Any) -> Contents:
        try:
            return {WHOLE: copy.deepcopy(self.travelling(obj, {})[WHOLE])}
        except Exception:  # it cannot be put back
            return {}

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        """Make *obj* anew as pickle makes another one, but in its place: what it had computed of its
        state goes."""
        if WHOLE not in contents:
            return
        (make, args), state, items, pairs, put = contents[WHOLE]
        other = make(*args)
        if other is obj:  # the only one of its kind
            return
        INSTANCE.put_back(obj, INSTANCE.look(other))
        if isinstance(obj, list | dict | set | deque):
            obj.clear()
        for item in items:
            (obj.add if isinstance(obj, set) else obj.append)(item)
        for key, value in pairs:
            obj[key] = value
        if put is not None:
            put(obj, state)
        elif state is not None:
            _set_state(obj, state)
        _set_attributes(obj, contents, ())


def _can_be_made_again(obj: Any, make: Any, args: tuple[Any, ...], state: Any = None) -> bool:
    """Whether an object can become another one of its class: it has nothing but attributes, or it is
    told all else as its state."""
    cls = type(obj)
    places = len(slots_of(obj)) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    if isinstance(obj, list | dict | set | deque) or (
        cls.__basicsize__ <= object.__basicsize__ + places * _POINTER and not cls.__itemsize__
    ):
        return True
    told = state is not None and hasattr(cls, "__setstate__")
    return told and not isinstance(obj, BaseException)  # whose args are no part of that


_POINTER = tuple.__itemsize__  # bytes


def _set_state(obj: Any, state: Any) -> None:
    """Give *obj* the state that pickle has taken of another one."""
    if hasattr(type(obj), "__setstate__"):
        obj.__setstate__(state)
        return
    state, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    own = attributes_of(obj)
    if own is not None:
        own.update(state or {})
        state = None
    for name, value in {**(state or {}), **(slots or {})}.items():
        object.__setattr__(obj, name, value)


class _ByName(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles classes and functions as their names: what they hold is looked at by itself."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, type) and is_sent_by_value(obj):
            return obj.__module__, obj.__qualname__
        if isinstance(obj, types.FunctionType) and is_sent_by_value(obj):
            return id(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        names = cached_names(type(obj))
        if not names or isinstance(obj, type):
            return super().reducer_override(obj)
        reduced = obj.__reduce_ex__(5)
        if isinstance(reduced, str) or len(reduced) < 3:
            return reduced
        return (*reduced[:2], _without(reduced[2], names), *reduced[3:])


def _without(state: Any, names: frozenset[str]) -> Any:
    """What pickle takes of an object, without what it has computed of the rest; None for nothing."""
    if type(state) is dict:
        return {key: value for key, value in state.items() if key not in names} or None
    if type(state) is tuple:
        rest = ((each, _without(each, names)) for each in state)
        return tuple(kept for each, kept in rest if kept is not None or each is None)
    return state


def cached_names(cls: type) -> frozenset[str]:
    """The attributes in which objects of *cls* keep what they have computed of the others.

    They are those of ``functools.cached_property`` and its like in libraries.
    """
    found = _CACHED.get(cls)
    if found is None:
        own = chain.from_iterable(vars(each).items() for each in cls.__mro__)
        cached = [(name, type(value).__name__) for name, value in own]
        names = {name for name, kind in cached if kind in _CACHING}
        pandas = any(kind == "CachedProperty" for _, kind in cached)  # which has a dict for them
        found = _CACHED[cls] = frozenset(names | {"_cache"} if pandas else names)
    return found


_CACHED: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_CACHING = {"cached_property", "lazyproperty", "reify"}


class _Crowd(Kind):
    """A container of so many objects that these are pickled, and compared, as a whole."""

    def look(self, obj: Any) -> Contents:
        return look_through(obj, {})[0]

    def travelling(self, obj: Any, contents: Contents) -> Contents:
        return container_kind(obj).look(obj)

    def kept(self, obj: Any) -> Contents:
        return container_kind(obj).look(obj)

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        container_kind(obj).put_back(obj, contents)


class _Sum:
    """A file that keeps the digest of what is written to it."""

    def __init__(self) -> None:
        import hashlib  # noqa: PLC0415  it takes a while, and few workers need it

        self._hash = hashlib.sha1(usedforsecurity=False)
        self._nbytes = 0

    def write(self, data: Any) -> None:
        self._hash.update(data)
        self._nbytes += len(data)

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is to be written with the rest."""
        try:
            self.write(buffer.raw())
        except BufferError:  # not contiguous
            return True
        return False

    @property
    def digest(self) -> Digest:
        return Digest(None, self._hash.digest(), self._nbytes)


class _Summer(pickle.Pickler):
    """Pickles a crowd, by pickle alone, which is quick.

    Classes and functions count as what they are, not for what they hold.

    Attributes:
        parts: these, and what is *known*, by id.
    """

    def __init__(self, total: _Sum, known: NumberOf) -> None:
        super().__init__(total, protocol=5, buffer_callback=total.keep)
        self.dispatch_table = dict(_CLOUDPICKLE)  # which looks up faster than a chain
        self._known = known
        self.parts: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        cls = type(obj)
        if cls in SIMPLE or cls is tuple:
            return None
        ident = id(obj)
        if cls is type or isinstance(obj, type | types.FunctionType):
            self.parts[ident] = obj
            return ident
        if self._known.get(ident) is not None:
            self.parts[ident] = obj
        return None


class _Fixed(Kind):
    """An object that is recognised, but never looked into: a compiled function, say."""

    def look(self, obj: Any) -> Contents:
        return {}

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        if isinstance(obj, functools._lru_cache_wrapper):  # ``push`` of it
            obj.cache_clear()


class _Generator(_Fixed):
    """A random generator."""

    def kept(self, obj: Any) -> Contents:
        return {WHOLE: state_of(obj)}

    def change(self, obj: Any, contents: Contents, gone: tuple[Any, ...]) -> None:
        if WHOLE in contents:
            put_state(obj, contents[WHOLE])


@dataclass(eq=False)
class Name:
    """A global: the dict of a module's names, and one of these.

    Attributes:
        names: the dict.
        name: the name.
        home: what has to live as long as this.
    """

    names: dict[str, Any]
    name: str
    home: object = None


DICT, SEQUENCE, ARRAY, TENSOR, INSTANCE = _Dict(), _Sequence(), _Array(), _Tensor(), _Instance()
STATEFUL, CLASS, FUNCTION, NAME = _Stateful(), _Class(), _Function(), _Name()
OPAQUE, FIXED, GENERATOR, CROWD, CONTEXT = _Opaque(), _Fixed(), _Generator(), _Crowd(), _Context()

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
_CLASS_OWN = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl"),
    *("__slots__", "__annotations__", "__annotate_func__", "__annotations_cache__", "__match_args__"),
    *("__static_attributes__", "__firstlineno__", "__dataclass_params__", "__slotnames__"),
}

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range),
    *(slice, types.CodeType, types.MemberDescriptorType, np.dtype),
    *(types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, re.Pattern),
    *(np.generic, np.ufunc, Variable, types.GenericAlias, types.UnionType, memoryview),
)
SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types that pickle itself takes, and that hold nothing else."""

_PLAIN_HOMES = {"datetime", "decimal", "fractions", "pathlib", "uuid", "zoneinfo"}
"""Modules of the standard library whose objects never change."""

_SEQUENCES = (list, set, deque, bytearray, array.array)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_CLOUDPICKLE = cloudpickle.Pickler.dispatch_table


def kind_of(obj: Any) -> Kind | None:  # noqa: PLR0911  one for each kind
    """The kind of *obj*; None for what never changes, and for containers that never change."""
    cls = type(obj)
    known = _BY_TYPE.get(cls)
    if known is not None:
        return known[0]
    if stays_here(obj):
        return FIXED
    if isinstance(obj, types.FunctionType):
        return FUNCTION if is_sent_by_value(obj) else None
    if isinstance(obj, type):
        return CLASS if is_sent_by_value(obj) else None
    if isinstance(obj, types.ModuleType | types.BuiltinMethodType) or is_plain(obj) or is_logger(obj):
        return None
    if inside(obj) is not None:
        return None
    if type(obj) is np.ndarray:
        return OPAQUE if obj.dtype.hasobject else ARRAY
    if is_tensor(obj):
        return TENSOR
    if singleton(obj) is not None:
        return None
    if is_generator(obj):
        return GENERATOR
    if is_numba(obj) or _home_of(cls).startswith(f"{__package__}."):  # a compiled graph
        return FIXED
    return _kind_of_instance(obj)


_BY_TYPE: dict[Any, tuple[Kind | None]] = dict.fromkeys((*_PLAIN, tuple, frozenset), (None,))
_BY_TYPE |= dict.fromkeys(_SEQUENCES, (SEQUENCE,))
_BY_TYPE |= {dict: (DICT,), Name: (NAME,), ContextVar: (CONTEXT,)}
KINDS = (
    *(DICT, SEQUENCE, ARRAY, TENSOR, INSTANCE, STATEFUL, CLASS, FUNCTION, NAME, OPAQUE, FIXED),
    *(GENERATOR, CROWD, CONTEXT),
)
"""All kinds; both sides know them by their places in here."""


def is_logger(obj: Any) -> bool:
    """Whether *obj* is a logger of ``logging``, which each process has by its name."""
    logging = sys.modules.get("logging")
    return logging is not None and isinstance(obj, logging.Logger)


def _kind_of_instance(obj: Any) -> Kind:  # noqa: PLR0911
    cls = type(obj)
    if isinstance(obj, types.SimpleNamespace):
        return INSTANCE
    if isinstance(obj, dict):
        return DICT
    if isinstance(obj, _SEQUENCES):
        return SEQUENCE
    if reduces_itself(cls) or cls in copyreg.dispatch_table or cls in _CLOUDPICKLE:
        if _is_foreign_function(obj):
            return FIXED
        return INSTANCE if is_named(obj) else OPAQUE
    if getattr(cls, "__getstate__", None) is getattr(object, "__getstate__", None):
        return INSTANCE
    if _has_stable_state(obj):
        return STATEFUL
    return FIXED if _is_foreign_function(obj) else OPAQUE


def _is_foreign_function(obj: Any) -> bool:
    """Whether *obj* is what an installed package has made to be called; NumPy's polynomials are
    numbers."""
    home = _home_of(type(obj))
    return callable(obj) and not is_own_name(home) and not home.startswith("numpy.polynomial")


def reduces_itself(cls: Any, base: Any = object) -> bool:
    """Whether a class says itself how pickle is to make its objects again, and not as its *base*."""
    return cls.__reduce_ex__ is not base.__reduce_ex__ or cls.__reduce__ is not base.__reduce__


def is_named(obj: Any) -> bool:
    """Whether pickle takes an object for a name in a module of the user's, which it travels without.

    Its ``__reduce__`` says so: it is the only one of its kind, such as a mark for what is missing.
    """
    cls: Any = type(obj)
    if cls in _UNNAMED or not reduces_itself(cls):
        return False
    if cls.__dictoffset__ == 0 or isinstance(obj, type | types.FunctionType):
        return False
    home = getattr(obj, "__module__", None)
    if not isinstance(home, str) or not is_own_name(home):
        return False
    with contextlib.suppress(Exception):  # it cannot be pickled
        if isinstance(obj.__reduce_ex__(4), str):
            return True
    _UNNAMED.add(cls)  # which may take long to ask
    return False


_UNNAMED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Classes of the user's whose objects are pickled by what they hold."""


def goes_by_number(obj: Any) -> bool:
    """Whether an object that travels back is the program's own, and no copy."""
    by_name = isinstance(obj, type | types.FunctionType)
    return by_name or (is_named(obj) and type(obj).__weakrefoffset__ != 0)


def _has_stable_state(obj: Any) -> bool:
    """Whether ``__getstate__`` returns a dict of the same objects each time, which can be compared."""
    try:
        one, other = obj.__getstate__(), obj.__getstate__()
    except Exception:  # it cannot be pickled
        return False
    return isinstance(one, dict) and isinstance(other, dict) and same_entries(one, other)


def is_plain(obj: Any) -> bool:
    """Whether *obj* never changes, and holds no other objects that could."""
    if isinstance(obj, Variable):
        return True
    if isinstance(obj, _PLAIN):
        return type(obj) in _BY_TYPE or not (isinstance(obj, np.void) or attributes_of(obj))
    return _home_of(type(obj)).partition(".")[0] in _PLAIN_HOMES


def is_for_program(obj: Any) -> bool:
    """Whether *obj* is of use in the main process only: a random generator, or ``Data``."""
    return is_generator(obj) or is_data(obj)


def is_data(obj: Any) -> bool:
    """Whether *obj* is ``Data``."""
    return getattr(type(obj), "ONLY_HERE", False) is True


def is_scalar(obj: Any) -> bool:
    """Whether *obj* is a number, a string or None."""
    return type(obj) in SIMPLE or isinstance(obj, np.number | np.bool_)


def are_alike_in_kind(cls: type) -> bool:
    """Whether all objects of *cls* are of one kind: those of a subclass of ``int``, say, are not."""
    return not issubclass(cls, _PLAIN)


def _home_of(cls: type) -> str:
    """The name of the module of a class, which a class may say wrongly."""
    home: Any = cls.__module__
    return home if isinstance(home, str) else ""


def inside(obj: Any) -> Iterator[tuple[str, Any]] | None:  # noqa: PLR0911
    """The parts of a container that never changes itself, with their names; None for others."""
    match obj:
        case tuple():
            return ((f"[{index}]", value) for index, value in enumerate(obj))
        case frozenset():
            return (("", value) for value in obj)
        case functools.partial():
            parts = [("", obj.func), *((f"[{n}]", value) for n, value in enumerate(obj.args))]
            return iter([*parts, *((f"[{key!r}]", value) for key, value in obj.keywords.items())])
        case types.MethodType():
            return iter([(".__self__", obj.__self__), ("", obj.__func__)])
        case types.BuiltinMethodType() if not isinstance(obj.__self__, types.ModuleType | type | None):
            return iter([(".__self__", obj.__self__)])
        case staticmethod() | classmethod():
            return iter([("", obj.__func__)])
        case property():
            return iter([("", part) for part in (obj.fget, obj.fset, obj.fdel) if part])
        case types.MappingProxyType():
            return ((f"[{key!r}]", value) for key, value in obj.items())
        case enum.Enum():
            return iter([("", type(obj))])
        case functools.cached_property():
            return iter([("", obj.func)])
    return None


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of what never changes itself, each with its name; None for what has none."""
    if isinstance(value, property):
        return [("get", value.fget), ("set", value.fset), ("del", value.fdel)]
    if kind_of(value) is not None:
        return None
    found = inside(value)
    return None if found is None else list(found)


_HEAP = 1 << 9  # a flag of types that are made by a class statement, say, and not in C


def inside_of_opaque(obj: Any) -> Contents:
    """What an object that only pickle can look into holds, as far as it shows."""
    found: Contents = INSTANCE.look(obj)
    if isinstance(obj, np.ndarray):
        return {**found, WHOLE: tuple(obj.flat)} if obj.dtype.hasobject else found
    if isinstance(obj, dict):
        found[WHOLE] = tuple(dict.values(obj))
    elif isinstance(obj, list | set | deque):
        found[WHOLE] = tuple(obj)
    elif isinstance(obj, BaseException):
        found[WHOLE] = obj.args
    return found


_CROWD = 20_000
"""A container of more objects is a crowd."""


def container_kind(obj: Any) -> Kind:
    """The kind of a container, were it no crowd."""
    return DICT if isinstance(obj, dict) else SEQUENCE


def is_crowd(obj: Any) -> bool:
    """Whether a container is to be compared as a whole: it holds many objects, and pickle takes them."""
    if len(obj) <= _CROWD or holds_only_plain(obj):
        return False
    try:
        _Summer(_Sum(), {}).dump(obj)
    except Exception:  # a closer look finds out which of them it is
        return False
    return True


def holds_only_plain(obj: Any) -> bool:
    """Whether a container holds nothing that could change: a quick look at many."""
    levels = [[*obj, *obj.values()] if isinstance(obj, dict) else obj]
    while levels:
        level = levels.pop()
        found = set(map(type, level))
        if not all(map(_is_plain_type, found)):
            return False
        if not found.isdisjoint(_FIXED_CONTAINERS):
            held = (each for each in level if type(each) in _FIXED_CONTAINERS)
            levels.append(list(chain.from_iterable(held)))
    return True


_FIXED_CONTAINERS = {tuple, frozenset}


def _is_plain_type(cls: type) -> bool:
    plain = issubclass(cls, np.number | np.bool_) or _home_of(cls).partition(".")[0] in _PLAIN_HOMES
    return plain or _BY_TYPE.get(cls) == (None,)


def look_through(obj: Any, known: NumberOf) -> tuple[Contents, list[Any]]:
    """The contents of a crowd; and those of its members that are objects of their own: those whose ids
    are *known*, classes and functions."""
    total = _Sum()
    pickler = _Summer(total, known)
    try:
        pickler.dump(obj)
        digest = total.digest
    except Exception:  # it will not be sent, and says then why
        digest = Digest(None, os.urandom(20))
    return {WHOLE: digest}, [part for part in pickler.parts.values() if part is not obj]


def is_sent_by_value(obj: Any) -> bool:
    """Whether a function or a class travels itself, and is not imported by its name on a worker."""
    if isinstance(obj, type) and not obj.__flags__ & _HEAP:
        return False
    name = getattr(obj, "__module__", None)
    if name == "__main__" or is_own_name(name):
        return True
    try:
        found: Any = sys.modules[str(name)]
        for part in obj.__qualname__.split("."):
            found = getattr(found, part)
    except AttributeError:
        return True
    return found is not obj


def stays_here(obj: Any) -> str:
    """What is to be said of an object that stays in the program; empty for all else."""
    what = stays(obj)
    imported = what and isinstance(obj, types.FunctionType) and not is_sent_by_value(obj)
    return "" if imported else what


# ── alike ────────────────────────────────────────────────────────────────────────────────────────────


def alike(one: Any, other: Any) -> bool:
    """Whether two entries are the same: one object, or equal ones that never change."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    for cls, same in _ALIKE:
        if isinstance(one, cls):
            own = isinstance(one, _VALUES) and (attributes_of(one) or attributes_of(other))
            same_attributes = not own or same_entries(
                attributes_of(one) or {}, attributes_of(other) or {}
            )
            return bool(same(one, other)) and same_attributes
    if isinstance(one, OF_PARTS):
        return same_entries(dict(parts_of(one) or ()), dict(parts_of(other) or ()))
    plain = is_plain(one) and not isinstance(one, Variable | np.ufunc)
    return plain and repr(one) == repr(other)  # which tells NaN, -0.0 and Decimal("1.00"), too


def _token(value: Any) -> Any:
    """What two alike elements of sets have in common, and no others."""
    if isinstance(value, tuple | frozenset) and not attributes_of(value):
        return type(value), (tuple if isinstance(value, tuple) else frozenset)(map(_token, value))
    return (type(value), repr(value)) if is_plain(value) else id(value)


def _alike_tuples(one: Any, other: Any) -> bool:
    return len(one) == len(other) and (all(map(is_, one, other)) or all(map(alike, one, other)))


_VALUES = (int, str, bytes, float, tuple)  # whose subclasses may have attributes

_ALIKE: tuple[tuple[Any, Callable[[Any, Any], Any]], ...] = (  # whatever subclasses say of themselves
    (int, int.__eq__),
    (str, str.__eq__),
    (bytes, bytes.__eq__),
    (np.generic, lambda one, other: (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())),
    (float, lambda one, other: float.__repr__(one) == float.__repr__(other)),
    (tuple, _alike_tuples),
    (frozenset, lambda one, other: _token(one) == _token(other)),
    (re.Pattern, lambda one, other: (one.pattern, one.flags) == (other.pattern, other.flags)),
)

OF_PARTS = (
    *(staticmethod, classmethod, property, types.MethodType, functools.partial),
    functools.cached_property,
)
"""Types of which two objects with the same parts are the same."""


def same_contents(kind: Kind, one: Contents, other: Contents) -> bool:
    """Whether two contents are the same; those of a dict have an order."""
    if kind is DICT and not all(map(alike, one, other)):
        return False
    return same_entries(one, other)


def same_entries(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two contents are the same."""
    if len(one) != len(other):
        return False
    if all(map(is_, one, other)) and all(map(is_, one.values(), other.values())):  # most often
        return True
    return all(key in other and alike(value, other[key]) for key, value in one.items())


def _digest(form: Any, data: Any) -> Digest:
    """What stands for the elements of an array."""
    total = _Sum()
    total.write(data)
    return total.digest._replace(form=form, nbytes=0)


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes; None if it has none."""
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        found = obj.__dict__ if isinstance(obj, threading.local) else None  # this thread's
    return found if isinstance(found, dict) else None


def slots_of(obj: Any) -> tuple[str, ...]:
    """The attributes of *obj* that have places of their own (``__slots__``)."""
    return tuple(copyreg._slotnames(type(obj)))  # type: ignore[attr-defined]


def own_slots(cls: type) -> list[str]:
    """The attributes in slots that *cls* itself adds."""
    given = vars(cls).get("__slots__", ())
    names = []
    for name in (given,) if isinstance(given, str) else tuple(given):
        if name not in ("__dict__", "__weakref__"):
            hidden = name.startswith("__") and not name.endswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{name}" if hidden else name)
    return names


_SINGLETONS = (("random", "_inst"), ("numpy.random.mtrand", "_rand"), ("torch", "default_generator"))
"""Objects of which every process has its own: the generators behind ``random.random`` and the like."""


def global_generators() -> list[Any]:
    """The random generators of this process that are there so far."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _SINGLETONS)
    return [generator for generator in found if generator is not None]


def singleton(obj: Any) -> tuple[str, str] | None:
    """The module and the name of an object of which every process has its own; None for others."""
    for module, name in _SINGLETONS:
        if getattr(sys.modules.get(module), name, None) is obj:
            return module, name
    return None
