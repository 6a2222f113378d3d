"""The arguments of a call, bound to the function's parameters: scattered ones and broadcast ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidType, InvalidValue, check_keywords, cut, shown
from ..values.foreign import library_named, library_of_function, module_of

RESERVED = ("batch", "batch_s", "num_slices", "output_subset", "progress")
"""Keywords of the call itself; a function's parameters cannot have these names."""

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Bound(NamedTuple):
    """One argument: its name in errors, whether every rank sees it whole, and its value.

    The function takes it as an array of *library* (None: as it comes; "numpy": arrays of others, too,
    are made NumPy's).
    """

    name: str
    broadcast: bool
    value: Any
    library: str | None


class Binder:
    """The parameters of one function, sorted into scattered and broadcast ones."""

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: str | Sequence[str] | None,
        bcast_inputs: str | Sequence[str] | None,
        name: str,
        unsplit: bool = False,
    ) -> None:
        """If *unsplit*, what is not in *inputs* is broadcast.

        Raises: InvalidType, InvalidValue where the names do not fit the function's parameters.
        """
        self._name = name
        self._unsplit = unsplit
        self._inputs = None if inputs is None else _names(inputs, "inputs")
        self._broadcast = _names(bcast_inputs or (), "bcast_inputs")
        listed = [*(self._inputs or ()), *self._broadcast]
        self._signature = _signature(fn, listed)
        self._called = cut(f"{name}{self._signature}")
        parameters = self._signature.parameters
        self._open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        self._check(parameters, listed)
        self._whole = library_of_function(fn)
        self._libraries = {p.name: library_named(p.annotation) for p in parameters.values()}
        positional = [p for p in parameters.values() if p.kind in _POSITIONAL]
        self._positional = [p.name for p in positional]
        variadic = [p.name for p in parameters.values() if p.kind is Parameter.VAR_POSITIONAL]
        self._variadic = variadic[0] if variadic else ""
        self._names = {p.name: p for p in parameters.values() if p.kind is not Parameter.VAR_POSITIONAL}
        self._required = sum(map(_is_required, positional))
        self._needs_keywords = any(
            _is_required(p) and p.kind is Parameter.KEYWORD_ONLY for p in parameters.values()
        )

    def _check(self, parameters: Mapping[str, Parameter], listed: list[str]) -> None:
        if next(iter(parameters), None) == "self":
            raise InvalidType(
                f"{self._called} is a method, and function() was given no object for it: "
                f"decorate no method, but write synk.function(obj.{self._name}); in __init__, say, "
                f"self.run = synk.function(self.{self._name})."
            )
        for known in parameters:
            if known in RESERVED:
                raise InvalidValue(
                    f"the function {self._name!r} has a parameter {known!r}, which is a keyword of the "
                    f"call itself: rename it."
                )
        for name in listed:
            if listed.count(name) > 1:
                raise InvalidValue(
                    f"{shown(name)} is listed twice for the function {self._name!r}: name each "
                    f"parameter once, in inputs (scattered) or in bcast_inputs (broadcast)."
                )
            if name not in parameters and not self._open_ended:
                raise InvalidValue(
                    f"the function {self._name!r} has no parameter {shown(name)}: its parameters are "
                    f"{cut(str(self._signature))}."
                )
        for p in parameters.values() if not self._unsplit else ():
            if self._inputs is not None and _is_required(p) and p.name not in listed:
                raise InvalidValue(self._unlisted(f"the parameter {p.name!r}"))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Bound]:
        """The arguments as they were given: first the positional ones, then those by keyword.

        Raises: InvalidType for a wrong number or unknown names of arguments.
        """
        known = len(self._positional)
        too_many = len(args) > known and not self._variadic
        if kwargs or self._needs_keywords or too_many or len(args) < self._required:
            if not (self._open_ended or kwargs.keys() <= self._names.keys()):
                self._check_keywords(kwargs)
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise InvalidType(f"{self._called} was called wrongly: {cut(str(error))}.") from None
        variadic = self._variadic
        bound = [
            self._bound(name, value, name) for name, value in zip(self._positional, args, strict=False)
        ]
        bound += [
            self._bound(f"{variadic}[{index}]", value, variadic)
            for index, value in enumerate(args[known:])
        ]
        return bound + [self._bound(name, value, name) for name, value in kwargs.items()]

    def _check_keywords(self, kwargs: dict[str, Any]) -> None:
        for name in kwargs:
            if name in RESERVED:
                raise InvalidType(
                    f"{name}= is a keyword of a call, and as_serial() and build_inputs() take the "
                    f"function's own arguments only: leave it out."
                )
        check_keywords(self._called, kwargs, [*self._names, *RESERVED])

    def _bound(self, name: str, value: Any, parameter: str) -> Bound:
        """The argument *value* of a *parameter*; *name* also has the place in a variadic one."""
        broadcast = parameter in self._broadcast
        broadcast = broadcast or (self._unsplit and parameter not in (self._inputs or ()))
        if self._inputs is not None and not broadcast and parameter not in self._inputs:
            raise InvalidType(self._unlisted(f"the argument {name!r}"))
        return Bound(name, broadcast, value, self._whole or self._libraries.get(parameter))

    def _unlisted(self, what: str) -> str:
        return (
            f"{what} of the function {self._name!r} is neither in inputs (scattered) nor in "
            f"bcast_inputs (broadcast): name it in one of them."
        )


def _is_required(p: Parameter) -> bool:
    """Whether a call has to give the parameter."""
    variadic = p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return p.default is Parameter.empty and not variadic


def _names(names: Any, keyword: str) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,)
    if isinstance(names, Sequence) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise InvalidType(f"{keyword} takes the names of parameters, a list of strings; got {shown(names)}.")


def _signature(fn: Callable[..., Any], listed: list[str]) -> inspect.Signature:
    """*fn*'s signature; for builtins without one, the *listed* names and ``*args``."""
    if module_of(fn) is fn:  # its own signature is (*args, **kwargs)
        module: Any = fn
        fn = getattr(module, "_orig_mod", module).forward
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        if isinstance(fn, np.ufunc):  # older versions of NumPy give them no signature
            listed = ["x"] if fn.nin == 1 else [f"x{number + 1}" for number in range(fn.nin)]
        parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in listed]
        return inspect.Signature([*parameters, Parameter("args", Parameter.VAR_POSITIONAL)])
