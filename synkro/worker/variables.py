"""What commands do with the variables of one rank."""

from __future__ import annotations

from operator import getitem

import numpy as np

from .. import messages
from ..comms.ops import OPERATIONS
from ..messages import Done, Phase
from ..values.arrays import Array, digest
from ..values.owners import sole_owner
from .call import taken
from .group import fitted
from .merging import Layout, Merger
from .replica import KeptReplica, Replica
from .workspace import Workspace


def create(rank: Workspace, command: messages.Create) -> None:
    array = rank.copied(rank.array(command.value))
    rank.variables[command.number] = Replica(command.name, array, rank.device, rank.comm)


def move(rank: Workspace, command: messages.Move) -> None:
    """Send the replica to another rank, or receive it, or copy it here."""
    source, target = command.source, command.target
    if source == target:
        array = rank.copied(rank.variables[command.variable].whole)
    else:
        ranks = (min(source, target), max(source, target))
        rank.begin(ranks)
        if rank.number == source:
            rank.comm.send(rank.variables[command.variable].whole, ranks.index(target))
            return
        array = rank.comm.recv(ranks.index(source))
    rank.variables[command.number] = Replica(None, array, rank.device, rank.comm, source == target)


def keep_outputs(rank: Workspace, command: messages.Keep) -> None:
    for kept in command.outputs:
        pieces = rank.handed_over(kept.leaf)
        # an array that nobody else refers to becomes the replica without a copy
        alone = len(pieces) == 1 and rank.device.owns(pieces[0]) and sole_owner(getitem, pieces, 0)
        array = pieces[0] if alone else _joined(rank, pieces, kept)
        kind = KeptReplica if rank.size > 1 else Replica
        rank.variables[kept.number] = kind(None, array, rank.device, rank.comm, not alone)


def _joined(rank: Workspace, pieces: list[Array], kept: messages.KeptOutput) -> Array:
    """The pieces of an output, copied into one array."""
    array = rank.comm.empty((sum(len(piece) for piece in pieces), *kept.tail), kept.dtype)
    start = 0
    for piece in pieces:
        rank.device.assign(array[start : start + len(piece)], piece)
        start += len(piece)
    return array


def write(rank: Workspace, command: messages.Write) -> None:
    for fill in command.fills:
        rows = fill.rows[rank.number]
        if rows is None:
            continue
        source: Array = rank.array(fill.source)
        if fill.selection is not None:
            source = taken(rank, source, fill.selection, rows)
        rank.variables[fill.variable].value = source


def read(rank: Workspace, command: messages.Read) -> Done:
    if rank.number not in command.ranks:
        return Done(None, None)
    values = [rank.variables[number].whole for number in command.variables]
    shown = tuple(value[None] if command.raised else value for value in values)
    merger = Merger("get_value", (command.mode,) * len(shown), several=False)
    merger.add(shown, 1, rank.device)
    layout = Layout()
    done = layout.place(merger, rank.outbox, rank.device)
    rank.keep(merger.leaves if layout.keeps else [])
    return done


def inspect(rank: Workspace, command: messages.Inspect) -> messages.Shapes:
    return messages.Shapes(tuple(rank.variables[number].whole.shape for number in command.variables))


def identify(rank: Workspace, command: messages.Identify) -> messages.Identity:
    whole = rank.variables[command.variable].whole
    return messages.Identity(digest(rank.device.beside(whole, np.empty(0))))


def exchange(rank: Workspace, command: messages.Exchange) -> None:
    variables = [rank.variables[number] for number in command.variables]
    rank.begin(tuple(range(rank.size)))
    rank.report(Phase.REDUCING, 0)
    arrays = [variable.whole for variable in variables]
    comm = rank.comm if command.nccl else rank.comm.by_host()
    match command.kind:
        case "all_reduce":
            rank.group.reduce_in_place(variables, OPERATIONS[command.op], comm)
        case "reduce":
            operation = OPERATIONS[command.op]
            results = comm.reduce(arrays, operation, 1, command.root) or []
            values = [fitted(r, v, operation) for v, r in zip(variables, results, strict=False)]
            for variable, value in zip(variables, values, strict=False):
                variable.value = value
        case "broadcast":
            mine = arrays if rank.number == command.root else None
            copies = comm.broadcast(mine, command.root, keep=True)
            if mine is None:
                for variable, array in zip(variables, copies, strict=True):
                    variable.adopt(array)
        case "all_gather":
            gathered = comm.all_gather(arrays, keep=True)
            for variable, array in zip(variables, gathered, strict=True):
                variable.adopt(array)
