"""What is said of the objects that functions bring along.

Why something cannot be sent to the workers: which function, which of its objects, what to do.  And what
has changed of the objects that they have: unseen, or on both sides.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import InvalidType, UsageError, WorkerError, reason, shortened
from ...messages import FunctionSpec
from ...packing.kinds import ARRAY, CLASS, INSTANCE, NAME, SEQUENCE
from ...packing.pickles import check_cause
from ...packing.refused import advice, advice_on_loading
from .known import Known
from .parts import loading, pickling
from .registry import Parts
from .walk import Found

_PICKLE_RAISES = (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError)

_ADVICE = "Create such an object inside the function, or pass what it is made of as an argument."


class _Trial(NamedTuple):
    """What is tried with a value.

    Attributes:
        on: returns what it raises.
        how: what that says of the value.
        advice: what to do, by what was raised.
    """

    on: Callable[[Any], Exception | None]
    how: str
    advice: Callable[[Exception], str]


def explain(
    error: Exception, specs: Mapping[int, FunctionSpec], found: Iterable[Found], parts: Parts
) -> None:
    """Raise an InvalidType that names the function among *specs*, or the object that was *found*, that
    cannot be pickled; *parts* need not be.

    Raises also: SharedMemoryError if no descriptor is left.
    """
    check_cause(error, "what functions use")
    trial = _Trial(lambda value: pickling(value, parts), "cannot be pickled", lambda why: _ADVICE)
    for spec in specs.values():
        if isinstance(error, InvalidType) and trial.on(spec.fn) is not None:  # it says what to do
            raise InvalidType(
                f"the function {spec.name!r} cannot be sent to the workers: {error}"
            ) from error
        _explain_function(spec, trial, found)
    if isinstance(error, UsageError):
        return
    _explain_object(found, trial)
    if isinstance(error, _PICKLE_RAISES):
        raise InvalidType(
            f"what a function uses cannot be sent to the workers: {reason(error)}. {_ADVICE}"
        ) from error


def explain_loading(
    error: WorkerError, specs: Mapping[int, FunctionSpec], found: Iterable[Found], parts: Parts
) -> None:
    """Raise an InvalidType that names the function among *specs*, or the object that was *found*, that
    was pickled, and that the workers could not make again."""

    how = "pickles here, and cannot be made again there"
    on, advised = loading(error), functools.partial(advice_on_loading, is_result=False)
    trial = _Trial(lambda value: on(value, parts), how, advised)
    for spec in specs.values():
        _explain_function(spec, trial, found)
    _explain_object(found, trial)


def _explain_object(found: Iterable[Found], trial: _Trial) -> None:
    each, why = _innermost(found, trial)
    if each is not None and why is not None:
        raise InvalidType(
            f"{each.path!r}, {shortened(each.obj)}, which a function uses, {trial.how} "
            f"({reason(why)}). {advice(each.obj) or trial.advice(why)}"
        ) from why


def _innermost(found: Iterable[Found], trial: _Trial) -> tuple[Found | None, Exception | None]:
    """The first new object that fails, and that holds no other, with what it raises."""
    new = {id(each.obj): each for each in found if each.known is None}
    failing = {}
    for ident, each in new.items():
        why = trial.on(each.contents if each.kind is NAME else each.obj)
        if why is not None:
            failing[ident] = each, why
    for each, why in failing.values():
        if each.kind is not NAME and not any(
            ident in failing for some in each.inner.values() for ident in some
        ):
            return each, why
    return None, None


def _explain_function(spec: FunctionSpec, trial: _Trial, found: Iterable[Found]) -> None:
    why = trial.on(spec.fn)
    if why is None:
        return
    where, culprit = "", spec.fn
    while not advice(culprit):
        failing = ((where, part, trial.on(part)) for where, part in _parts(culprit))
        way, part, inner = next((each for each in failing if each[2] is not None), ("", None, None))
        if inner is None:
            break
        of = f" (of {culprit.__name__!r})" if where else ""
        where, culprit, why = f"{way}{of}", part, inner
        if not inspect.isfunction(part):
            break
    subject = f"{where}, {shortened(culprit)}," if where else "it"
    hidden = where and "weakref" in str(why) and not advice(culprit)  # somewhere in it, by another name
    inmost = _innermost(found, trial)[0] if hidden else None
    if inmost is not None and inmost.obj is not culprit and not inspect.isroutine(inmost.obj):
        subject += f" with {inmost.path}, {shortened(inmost.obj)},"
        culprit = inmost.obj
    raise InvalidType(
        f"the function {spec.name!r} cannot be sent to the workers: {subject} {trial.how} "
        f"({reason(why)}). {advice(culprit) or trial.advice(why)}"
    ) from why


def _parts(fn: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a callable carries along, each with its name in a sentence."""
    for name in ("__self__", "func"):  # a bound method's object, a partial's function
        if hasattr(fn, name):
            part = getattr(fn, name)
            yield f"its {name}", part
            yield from _parts(part)
    for index, value in enumerate(getattr(fn, "args", ())):
        yield f"its argument {index}", value
    for name, value in getattr(fn, "keywords", {}).items():
        yield f"its argument {name!r}", value
    if inspect.isfunction(fn) or inspect.ismethod(fn):
        used = inspect.getclosurevars(fn)
        for name, value in used.nonlocals.items():
            yield f"the variable {name!r} that it closes over", value
        for name, value in used.globals.items():
            yield f"the global variable {name!r} that it uses", value
    else:
        for name, value in getattr(fn, "__dict__", {}).items():
            yield f"its attribute {name!r}", value
    for index, value in enumerate(getattr(fn, "__defaults__", None) or ()):
        yield f"the default of its parameter {index}", value
    if inspect.isfunction(fn):
        for name, value in inspect.get_annotations(fn).items():
            yield f"the annotation of {name!r}", value


# ── objects that the workers have ────────────────────────────────────────────────────────────────────


def missed(unseen: Sequence[Known], function: str) -> str:
    """The warning of what has changed *unseen* between two calls of a *function*."""
    roots = dict(map(called_of, unseen))
    paths = ", ".join(map(_in_code, unseen[:3])) + ", …" * (len(unseen) > 3)
    part = "" if paths in roots.values() else f" (in {paths})"
    pushes = " and ".join(f"synk.push({name})" for name in [*roots.values()][:3])
    return (
        f"{', '.join([*roots][:3])}, which the function {function!r} uses, changed here since it was "
        f"sent{part}. The workers have it now as it is, but may have missed it in the last calls: not "
        f"all of it is compared at each call. Call {pushes} when you have changed it, or pass it as an "
        f"argument."
    )


def uncompared(unseen: Iterable[Known], function: str) -> Iterator[tuple[str, str]]:
    """What the calls of a *function* do not compare: the name of each object, and a sentence."""
    counts: dict[str, dict[str, int]] = {}
    for known in unseen:
        what = {ARRAY: "bytes", INSTANCE: "attributes"}.get(known.kind, "entries")
        held = known.obj if known.kind is SEQUENCE else known.contents or ()
        size = known.obj.nbytes if known.kind is ARRAY else len(held)
        found = counts.setdefault(called_of(known)[1], {})
        found[what] = found.get(what, 0) + size
    for name, sizes in counts.items():
        told = " and ".join(f"{size:,} {what}" for what, size in sizes.items())
        yield (
            name,
            f"{name!r}, which the function {function!r} uses, has {told} that are not compared at each "
            f"call: changes in them reach the workers when you push({name}).",
        )


def contradiction(known: Known, users: set[str]) -> str:
    """What to say of what has changed on both sides, and which functions, the *users*, use."""
    named = ", ".join(map(repr, sorted(users)))
    use = f"the functions {named} use" if len(users) > 1 else f"the function {named} uses"
    use = use if users else "a function of an earlier call used"
    called, name = called_of(known)
    part = f" (in {_in_code(known)})" if _in_code(known) != name else ""
    theirs = f"take a copy, {name} = synk.fetch({name})."
    if known.kind is CLASS:
        theirs = "return what you need of it from a function."
    return (
        f"{called}, which {use}, has changed here and on the workers since it was sent{part}. To go "
        f"on with what it is here, call synk.push({name}); to go on with what it is there, {theirs}"
    )


def _in_code(known: Known) -> str:
    """The path of an object, as one would write it."""
    _, own, inner = known.path.partition(".__self__")
    return f"obj{inner}" if own else known.path


def called_of(known: Known) -> tuple[str, str]:
    """What to call the outermost object of a path in a sentence and in code: its name, or ``obj``, if it
    is the object of a method, or is called itself."""
    head, own, _ = known.path.partition(".__self__")
    if own:
        return f"the object (obj) of {head!r}", "obj"
    name = head.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0]
    return f"the object {name!r}", name
