"""What is said of the objects that functions bring along."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...packing.kinds import ARRAY, CLASS, INSTANCE, SEQUENCE
from .known import Known


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
