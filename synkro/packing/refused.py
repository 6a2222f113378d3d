"""What cannot be sent to the workers, and what to do instead."""

from __future__ import annotations

import functools
import io
import re
import weakref
from types import FunctionType, GeneratorType
from typing import Any

from ..errors import A_LINE, InvalidType, shown, with_article

_ADVICE = {
    "torch.jit": "Send the plain function or module; or save it with torch.jit.save, and load it in the "
    "function.",
    "jax._src.stages": "Send the function that jax.jit has made: every worker compiles it once.",
    "pmap": "Send the plain function, or what jax.jit makes of it: the workers are the parallel map.",
    "compiled": "Send the plain function, and compile it there, at its first call; or decorate it with "
    "torch.compile in a module, which the workers import.",
    "generator": "Make a list of it first, or make it inside the function.",
    "h5py": "Give a dataset to the function as an argument, synk.data(dataset): each worker reads its "
    "rows; or open the file in the function, by its path.",
    "weakref": "A weak reference holds nothing, and nobody would hold it there: refer to the object "
    "itself, or leave the reference out in the __getstate__ of the class, and set it in __setstate__.",
    "file": "Open it inside the function, and send its path.",
}


def is_open_file(value: Any) -> bool:
    """Whether *value* is a file; cloudpickle would quietly send its contents."""
    return isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO)


def refuse_open_file(value: Any) -> None:
    """Raises: TypeError where *value* is one; of a worker's, too."""
    if is_open_file(value):
        raise TypeError(
            f"cannot send the open file {shown(value, A_LINE)}: send its path, or what it holds"
        )


def is_parallel_map(value: Any) -> bool:
    """Whether *value* is what ``jax.pmap`` makes: a worker has one device to map over."""
    return _kind(value) == "pmap"


def advice(value: Any) -> str | None:
    """What to do instead of sending *value*, a sentence; None if no more is known than of any object."""
    return _ADVICE.get(_kind(value))


def advice_on_loading(error: BaseException, is_result: bool = True) -> str:
    """What to do about a value that could be pickled, and not be unpickled, a sentence: about a result,
    or about what goes to the workers."""
    made = re.search(r"(\w+)\.__(init|new)__\(\)", str(error))
    if made is None:
        do = "Return what it is made of" if is_result else "Make it inside the function"
        return f"{do}, or mend the __reduce__ of its class."
    if not is_result:
        return f"Give {made[1]} a __reduce__ with all that its __{made[2]}__ takes."
    return (
        f"Python makes an exception again from its class and its args alone: return repr(error), or "
        f"give {made[1]} a __reduce__ with all that its __{made[2]}__ takes."
    )


class Absent:
    """Stands on a worker for what stays in the program: whatever uses it is told."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise InvalidType(f"{self._what}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what pickle and inspect ask every object for
            raise AttributeError(name)
        return self._raise()

    def __reduce__(self) -> Any:
        return Absent, (self._what,)


_USES = (
    *("call", "len", "iter", "contains", "getitem", "setitem", "delitem", "setattr"),
    *("enter", "exit", "next", "add"),
)
for _name in (*_USES, "or", "ior", "and", "sub"):
    setattr(Absent, f"__{_name}__", Absent._raise)

_WEAK = {weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet}
_CHOOSER: Any = functools.singledispatch(lambda value: value).__code__  # type: ignore[attr-defined]


class _Choosing:
    @functools.singledispatchmethod
    def choose(self, value: Any) -> Any:
        return value


_bound: Any = _Choosing().choose  # before Python 3.14 a function
_BOUND_CHOOSER = getattr(_bound, "__code__", _CHOOSER)


def stays(value: Any) -> str:
    """What is to be said where a worker uses *value*, which pickle refuses and of which most programs
    use nothing there; empty for all else."""
    cls = type(value)
    if cls in _WEAK:
        return (
            f"{with_article(cls.__name__)}, which the program has here, does not travel: it holds what "
            f"others hold, and nobody does on a worker. Give the function a dict, or a list, of what it "
            f"needs."
        )
    method = cls is functools.singledispatchmethod
    code = value.__code__ if cls is FunctionType else None
    if method or code in (_CHOOSER, _BOUND_CHOOSER) or (code is None and cls is type(_bound)):
        name = getattr(value.func if method else value, "__name__", "")
        return (
            f"{name!r} chooses a function by the type of its argument (functools.singledispatch), and "
            f"does not travel: call the function that is meant, or choose by isinstance()."
        )
    return ""


def _kind(value: Any) -> str:
    if isinstance(value, GeneratorType):
        return "generator"
    if is_open_file(value):
        return "file"
    if hasattr(value, "_torchdynamo_orig_callable"):
        return "compiled"
    if getattr(value, "__globals__", {}).get("__name__") == "jax._src.pmap":
        return "pmap"
    home = type(value).__module__
    if home.startswith("h5py."):
        return "h5py"
    return "torch.jit" if home.startswith("torch.jit") else home
