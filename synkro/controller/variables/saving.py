"""Named variables and random generators of all ranks, to a file and back.

The file is NumPy's ``.npz``.  Its entry ``synkro`` is a JSON text: the number of ranks, the states of
their generators and of the main process's (``as_serial``), the
seed and the number of the next map, and the names of each variable's entries.  A
variable has one entry, ``name``, if all replicas were equal, else one a rank, ``name@rank``.  Names that
are not fit for files are replaced by numbers.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from ...errors import InvalidType, InvalidValue, counted, ranks_in_words, shown
from ...memory.segment import undoing
from ...values.arrays import Array, is_numeric
from .registry import Variables
from .shared import Shared

_FORMAT = 1


def save(variables: Variables, path: str | os.PathLike[str]) -> None:
    """Write the file under another name, and give it its own when it is complete on the disk."""
    target, collectives = _npz(path), variables.collectives
    entries: dict[str, Any] = {"synkro": None}
    places: dict[str, list[str]] = {}
    for name, variable in _by_name(variables).items():
        alike = len(variable.ranks) == 1 or collectives.are_alike(variable)
        places[name] = []
        for place, rank in enumerate(variable.ranks[:1] if alike else variable.ranks):
            entry = _entry(name if alike else f"{name}@{place}", entries)
            entries[entry] = np.asarray(collectives.get_value(rank, variable))
            places[name].append(entry)
    header = {
        "format": _FORMAT,
        "ranks": collectives.size,
        "generators": collectives.generators(),
        "own": variables.rng().bit_generator.state,
        "maps": variables.maps,
        "places": places,
    }
    entries["synkro"] = np.array(json.dumps(header))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    with undoing(os.unlink, temporary):
        with os.fdopen(handle, "wb") as file:
            with ZipFile(file, "w") as archive:
                for name, array in entries.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry_file:
                        np.lib.format.write_array(entry_file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(variables: Variables, path: str | os.PathLike[str]) -> None:
    """Read and check all of the file, and then set all variables and generators.

    Raises: InvalidValue if it is no file of ``save()``, or does not fit the session; OSError.
    """
    source, collectives = _npz(path), variables.collectives
    try:
        with source.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            entries = dict(file)
        header = json.loads(str(entries["synkro"]))
        ranks, generators, places = header["ranks"], header["generators"], header["places"]
        stored = {name: [entries[entry] for entry in at] for name, at in places.items()}
    except OSError:
        raise
    except Exception as error:  # whatever a damaged file makes of the libraries that read it
        raise InvalidValue(f"{source} is no file that synkro.save() wrote, or damaged.") from error
    if ranks != collectives.size:
        raise InvalidValue(
            f"{source} was saved by {counted(ranks, 'worker')}, and this session has "
            f"{collectives.size}: fork as many."
        )
    known = _by_name(variables)
    if set(known) != set(stored):
        missing, extra = set(known) - set(stored), set(stored) - set(known)
        raise InvalidValue(
            f"the named variables of this session are not those of {source}: "
            f"{_listed(missing, 'in the session alone')}{_listed(extra, 'in the file alone')}make the "
            f"same variables with shared(…, name=…) first."
        )
    for name, replicas in stored.items():
        ranks = known[name].ranks
        if len(replicas) not in (1, len(ranks)):
            raise InvalidValue(
                f"{source} has {counted(len(replicas), 'replica')} of {known[name].called()}, which is "
                f"on {ranks_in_words(ranks)}: make it with the target= that it had."
            )
        fitting = [_fitting(known[name], replica) for replica in replicas]
        stored[name] = fitting * len(ranks) if len(fitting) == 1 else fitting
    for name, replicas in stored.items():
        for rank, replica in zip(known[name].ranks, replicas, strict=True):
            collectives.set_value(rank, known[name], replica)
    collectives.generators(tuple(generators))
    if "own" in header:
        variables.rng().bit_generator.state = header["own"]
    if "maps" in header:
        variables.go_on_with(*header["maps"])


def _by_name(variables: Variables) -> dict[str, Shared]:
    """The variables that have names, by these.  Raises: InvalidValue if there is none, or two have the
    same name."""
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
        raise InvalidValue(
            "no variable has a name: make those to be saved with shared(…, name=…). (PyTensor's own are "
            "saved only as parameters of an update rule.)"
        )
    return named


def _entry(wanted: str, taken: dict[str, Any]) -> str:
    """An entry's name: the *wanted* one, where it is fit for a file and not *taken*."""
    fit = re.fullmatch(r"[\w.@ -]{1,200}", wanted, re.ASCII) and not wanted.endswith(".npy")
    return wanted if fit and wanted not in taken else f"variable {len(taken)}"


def _npz(path: str | os.PathLike[str]) -> Path:
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise InvalidType(f"expected the path of a file; got {shown(path)}.") from None
    if not os.path.basename(name) or "\0" in name:
        raise InvalidValue(f"expected the path of a file, with a name; got {shown(path)}.")
    return Path(name if name.endswith(".npz") else f"{name}.npz")


def _fitting(variable: Shared, value: Array) -> Array:
    """What was read, as a value of *variable*.  Raises: InvalidValue if it does not fit."""
    unnamed = value.dtype.kind == "V" and value.dtype.names is None and is_numeric(variable.dtype)
    if unnamed and value.dtype.itemsize == variable.dtype.itemsize:
        value = value.view(variable.dtype)  # one that NumPy's files have no name for
    if value.dtype != variable.dtype or value.ndim != variable.ndim:
        raise InvalidValue(
            f"{variable.called()} holds {variable.dtype} in {counted(variable.ndim, 'dimension')}, "
            f"the file {value.dtype} in {value.ndim}: make it as it was when it was saved."
        )
    return value


def _listed(names: set[str], where: str) -> str:
    return f"{', '.join(map(repr, sorted(names)))} {where}; " if names else ""
