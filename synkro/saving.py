"""Named variables and random generators of all ranks, to a file and back.

The file is NumPy's ``.npz``.  Its entry ``synkro`` is a JSON text: how many ranks there were, the states
of their generators, and for each variable whether all ranks had the same (one entry, ``name``) or each
its own (entries ``name@rank``).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from .arrays import Array
from .errors import InvalidValue
from .shared import Shared
from .variables import Variables

_FORMAT = 1


def save(variables: Variables, path: str | os.PathLike[str]) -> None:
    """Write the file under another name, and give it its own when it is complete on the disk."""
    target = _npz(path)
    entries: dict[str, Any] = {}
    alike = {}
    for name, variable in _by_name(variables).items():
        replicas = [np.asarray(variables.get_value(rank, variable)) for rank in range(variables.size)]
        alike[name] = all(_same(replicas[0], replica) for replica in replicas[1:])
        for rank, replica in enumerate(replicas[:1] if alike[name] else replicas):
            entry = name if alike[name] else f"{name}@{rank}"
            if entry in entries or entry == "synkro":
                raise InvalidValue(f"the variable {name!r} cannot be saved under this name: rename it.")
            entries[entry] = replica
    header = {
        "format": _FORMAT,
        "ranks": variables.size,
        "generators": variables.generators(),
        "alike": alike,
    }
    entries["synkro"] = np.array(json.dumps(header))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            with ZipFile(file, "w") as archive:
                for name, array in entries.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry_file:
                        np.lib.format.write_array(entry_file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(variables: Variables, path: str | os.PathLike[str]) -> None:
    """Read and check all of the file, and then set all variables and generators.

    Raises: InvalidValue if it is no file of ``save()``, or does not fit the session; OSError.
    """
    source = _npz(path)
    try:
        with np.load(source, allow_pickle=False) as file:
            entries = dict(file)
        header = json.loads(str(entries.pop("synkro")))
    except (KeyError, ValueError, BadZipFile) as error:
        raise InvalidValue(f"{source} is no file that synkro.save() wrote.") from error
    if header["ranks"] != variables.size:
        raise InvalidValue(
            f"{source} was saved by {header['ranks']} workers, and this session has {variables.size}: "
            f"fork as many."
        )
    known = _by_name(variables)
    if set(known) != set(header["alike"]):
        missing, extra = set(known) - set(header["alike"]), set(header["alike"]) - set(known)
        raise InvalidValue(
            f"the named variables of this session are not those of {source}: "
            f"{_listed(missing, 'in the session alone')}{_listed(extra, 'in the file alone')}make the "
            f"same variables with shared(…, name=…) first."
        )
    values = {name: _replicas(entries, name, header) for name in known}
    for name, replicas in values.items():
        for replica in replicas:
            _check_fit(known[name], replica)
    for name, replicas in values.items():
        for rank, replica in enumerate(replicas):
            variables.set_value(rank, known[name], replica)
    variables.generators(tuple(header["generators"]))


def _by_name(variables: Variables) -> dict[str, Shared]:
    """Raises: InvalidValue if there is none, or two have the same name."""
    named: dict[str, Shared] = {}
    for variable in variables.named():
        assert variable.name is not None
        if variable.name in named:
            raise InvalidValue(
                f"two variables have the name {variable.name!r}, and only one could be saved: give each "
                f"a name of its own, or drop the older one, and the functions that use it."
            )
        named[variable.name] = variable
    if not named:
        raise InvalidValue("no variable has a name: make those to be saved with shared(…, name=…).")
    return named


def _npz(path: str | os.PathLike[str]) -> Path:
    name = os.fspath(path)
    return Path(name if name.endswith(".npz") else f"{name}.npz")


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _replicas(entries: dict[str, Array], name: str, header: dict[str, Any]) -> list[Array]:
    ranks = range(header["ranks"])
    return [entries[name if header["alike"][name] else f"{name}@{rank}"] for rank in ranks]


def _check_fit(variable: Shared, value: Array) -> None:
    if value.dtype != variable.dtype or value.ndim != variable.ndim:
        raise InvalidValue(
            f"{variable.called()} holds {variable.dtype} in {variable.ndim} dimensions, the file "
            f"{value.dtype} in {value.ndim}: make it as it was when it was saved."
        )


def _listed(names: set[str], where: str) -> str:
    return f"{', '.join(map(repr, sorted(names)))} {where}; " if names else ""
