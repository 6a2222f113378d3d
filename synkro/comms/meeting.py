"""Where the ranks of a call meet: each rank says what it does, and sees what the others do.

All state is in the *board*, at the beginning of the arena's file; each rank writes only its own line::

    rank a                              board                              rank b
    ──────                              ─────                              ──────
    meet   record in its own memory ─▶ [ a: RECORD, REACHED ]
           waits for all            ◀─ [ b: RECORD, REACHED ] ◀── record    meet
    step   REACHED + 1, waits for all  (all have computed their share)      step
    part   REACHED + 1, waits for all  (nobody reads another's memory any more)

``REACHED`` grows by four in each collective, also in one that fails, so that all ranks stay in step.  A
rank whose function has ended says so in ``LEFT``.  A rank that used no collective writes nothing: its
reply to the main process shows that it is done.  No rank waits for ever: if all ranks wait and none of
their conditions holds, nothing can change any more, and the first rank to notice raises an error.

A rank waits as ``ipc.waiting`` says: it polls for a moment, and then sleeps on its eventfd.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import CollectiveError
from ..ipc.waiting import Fence, sleep_until, spin
from ..memory.arena import Arena
from ..values.cache import Cache

KINDS = (
    "nothing",
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
)
_RECV, _SEND = KINDS.index("recv"), KINDS.index("send")

_WORD = 8
_LINE = 16  # words of a rank's line: two cache lines
_EPOCH, _REACHED, _LEFT, _SLEEPS, _DOES, _FOR = range(6)
_RECORDS = 8  # two, each an offset and a size: a rank that is ahead must not overwrite what others read
_STEPS = 4  # of REACHED, a collective
_RETURNED, _FAILED = 1, 2  # LEFT of a rank that has ended its function

_SLOTS = 8  # messages from one rank to another that may wait to be received
_SENT, _FIRST, _RECEIVED, _FIRST_SLOT = 0, 1, 8, 16  # words of a pair's box; a cache line a writer
_AT, _OF_EPOCH, _NUMBER, _SLOT = 0, 1, 2, 3  # words of a slot, and their number
_BOX = _FIRST_SLOT + _SLOT * _SLOTS
_NONE = (1 << 64) - 1  # the number of no message

_NAP = 100  # milliseconds until a sleeper checks whether its wait can still end


class _Record:
    """Memory for a record of this rank, and the record that lies there."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        array = arena.empty((nbytes,), np.uint8)
        at = arena.locate(array)
        assert at is not None
        self.at = at
        self.memory = array.data
        self.payload = b""

    def write(self, payload: bytes) -> None:
        """Show *payload* from now on."""
        self.memory[: len(payload)] = payload
        self.payload = payload


def board_bytes(size: int) -> int:
    """The size of the board for *size* ranks."""
    return (size * _LINE + size * size * _BOX) * _WORD


class Meeting:
    """One rank's end.

    Attributes:
        group: the ranks that take part in the running call, in order.
        place: the index of this rank in it.
    """

    def __init__(
        self,
        board: memoryview,
        rank: int,
        size: int,
        arena: Arena,
        wakes: Sequence[int],
        answered: Callable[[int, int], bool] | None,
    ) -> None:
        """*answered(rank, epoch)* tells whether a rank has replied to the command of that call."""
        self.rank = rank
        self.group: tuple[int, ...] = (rank,)
        self.place = 0
        self._size = size
        self._words = board.cast("Q")
        self._line = rank * _LINE
        self._others: list[int] = []
        self._arena = arena
        self._wakes = wakes
        self._own = [_Record(arena, 2048) for _ in range(2)]
        self._seen: Cache[tuple[int, int], memoryview] = Cache()
        self._epoch = 0
        self._count = 0
        self._answered = answered
        self._announced = False
        self._unfinished = False
        self._posting: set[int] = set()  # the ranks that this call has sent something to
        self._name = ""
        self._fence = Fence()

    # ── a call ───────────────────────────────────────────────────────────────────────────────────

    def begin(self, epoch: int, group: tuple[int, ...]) -> None:
        """A call begins, in which *group* takes part; *epoch* grows from call to call."""
        if group != self.group:
            self.group = group
            self.place = group.index(self.rank)
            self._others = [rank * _LINE for rank in group if rank != self.rank]
        self._epoch = epoch
        self._count = 0
        self._announced = self._unfinished = False

    def end(self, failed: bool) -> None:
        """The call has ended on this rank, which wakes the ranks that wait for it.

        A rank that never came to the board, and did not fail, writes nothing: its reply shows it.
        """
        if not (self._announced or failed or self._answered is None):
            return
        if not self._announced:
            self._announce()
        self._leave(_FAILED if failed else _RETURNED)
        self._rouse(self.group)

    def _announce(self) -> None:
        """Come to the board: the first time in a call."""
        self._announced = True
        self._posting.clear()
        self._words[self._line + _REACHED] = 0
        self._leave(0)

    def _leave(self, how: int) -> None:
        self._words[self._line + _LEFT] = how
        self._fence()  # LEFT (and REACHED) before EPOCH, which makes them count
        self._words[self._line + _EPOCH] = self._epoch
        self._fence()  # EPOCH before the loads of who sleeps, in _rouse

    # ── a collective ─────────────────────────────────────────────────────────────────────────────

    def meet(self, kind: int, payload: bytes) -> list[bytes]:
        """Wait until all ranks enter their next collective; returns their records, by place.

        Raises: CollectiveError if one never will, or if an exception took this rank out of the last one.
        """
        if self._unfinished:
            self.end(failed=True)
            raise CollectiveError(
                f"rank {self.rank} was thrown out of {self.where()} by an exception, and went on: the "
                f"ranks are out of step, and can meet again in the next call only."
            )
        if not self._announced:
            self._announce()
        self._unfinished = True
        self._count += 1
        self._name = KINDS[kind]
        turn = self._count % 2
        record = self._own[turn]
        if payload is not record.payload:
            if len(payload) > len(record.memory):
                record = self._own[turn] = _Record(self._arena, 2 * len(payload))
            record.write(payload)
        word = self._line + _RECORDS + 2 * turn
        self._words[word], self._words[word + 1] = record.at, len(payload)
        self._reach_all(self._count * _STEPS, kind)
        return [payload if rank == self.rank else self._record_of(rank) for rank in self.group]

    def step(self) -> None:
        """Wait until all ranks have come to the next step."""
        self._reach_all(self._words[self._line + _REACHED] + 1, self._words[self._line + _DOES])

    def part(self) -> None:
        """End the collective: wait until no rank reads another's memory any more."""
        self._reach_all(self._count * _STEPS + _STEPS - 1, self._words[self._line + _DOES])
        self._unfinished = False

    def pass_on(self) -> None:
        """End the collective without a wait, if no rank reads another's memory in it."""
        self._unfinished = False

    def mark(self) -> None:
        """Come to the next step without waiting for the others."""
        self._words[self._line + _REACHED] += 1
        self._fence()  # REACHED before this rank begins to move data

    def behind(self) -> list[int]:
        """The ranks that have not come as far as this one."""
        mine = self._words[self._line + _REACHED]
        return [line // _LINE for line in self._others if self._words[line + _REACHED] < mine]

    def overtaken(self) -> bool:
        """Whether another rank has come further than this one."""
        mine = self._words[self._line + _REACHED]
        return any(self._words[line + _REACHED] > mine for line in self._others)

    def failed(self) -> bool:
        """Whether the function of another rank has failed in this call."""
        return any(map(self._has_failed, self._others))

    def _has_failed(self, line: int) -> bool:
        return self._words[line + _EPOCH] == self._epoch and self._words[line + _LEFT] == _FAILED

    def where(self) -> str:
        """The running collective, in words."""
        if self._name.startswith(("send", "recv")):
            return self._name
        return f"{self._name} (collective {self._count} of this call)"

    def entry(self) -> tuple[int, str]:
        """The number of the call, and the collective that it has entered last, in words."""
        return self._epoch, f"{self._name} (collective {self._count})"

    def _record_of(self, rank: int) -> bytes:
        word = rank * _LINE + _RECORDS + 2 * (self._count % 2)
        place = self._words[word], self._words[word + 1]
        memory = self._seen.get(place)
        if memory is None:
            memory = self._seen[place] = self._arena.view(place[0], (place[1],), np.uint8).data
        return memory.tobytes()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def post(self, to: int, at: int) -> int:
        """Put a message (the offset of a block) into the box for rank *to*; returns its number.

        Waits while the box is full.  Raises: CollectiveError if it will never be emptied.
        """
        if not self._announced:
            self._announce()
        words, box = self._words, self._box(self.rank, to)
        self._name = f"send to rank {to}"
        if to not in self._posting:  # what is left of earlier calls does not count
            self._posting.add(to)
            words[box + _FIRST] = words[box + _SENT]
        self._until(lambda: not self._full(box), _SEND, to)
        number = words[box + _SENT]
        slot = box + _FIRST_SLOT + _SLOT * (number % _SLOTS)
        words[slot + _NUMBER] = _NONE
        self._fence()  # "no message" before its parts change; pairs with the last look in fetch
        words[slot + _AT], words[slot + _OF_EPOCH] = at, self._epoch
        self._fence()  # the parts before the number that makes them count
        words[slot + _NUMBER] = number
        self._fence()  # the slot before SENT, by which the receiver finds it
        words[box + _SENT] = number + 1
        self._fence()  # SENT before the load of whether the receiver sleeps
        self._rouse([to])
        return number

    def _full(self, box: int) -> bool:
        words = self._words
        return words[box + _SENT] - max(words[box + _RECEIVED], words[box + _FIRST]) >= _SLOTS

    def fetch(self, source: int) -> int:
        """Wait for the next message of rank *source*; returns what it posted."""
        if not self._announced:
            self._announce()
        words, box = self._words, self._box(source, self.rank)
        self._name = f"recv from rank {source}"
        while True:
            self._until(lambda: words[box + _SENT] != words[box + _RECEIVED], _RECV, source)
            self._fence()  # SENT is loaded before the slot
            number = words[box + _RECEIVED]
            slot = box + _FIRST_SLOT + _SLOT * (number % _SLOTS)
            fresh = words[slot + _NUMBER] == number
            self._fence()  # the number is loaded before the parts
            fresh = fresh and words[slot + _OF_EPOCH] == self._epoch
            at = words[slot + _AT]
            self._fence()  # the parts are loaded before the second look at the number
            if fresh and words[slot + _NUMBER] == number:
                return at
            self.fetched(source)  # one of an earlier call, which nobody received

    def fetched(self, source: int) -> None:
        """The message has been read: its sender may have its memory back."""
        self._fence()  # the message is read before RECEIVED gives its memory back
        self._words[self._box(source, self.rank) + _RECEIVED] += 1
        self._fence()  # RECEIVED before the load of whether the sender sleeps
        self._rouse([source])

    def received(self, to: int) -> int:
        """How many of the messages posted to rank *to* have been read."""
        return self._words[self._box(self.rank, to) + _RECEIVED]

    def _box(self, source: int, to: int) -> int:
        return self._size * _LINE + (source * self._size + to) * _BOX

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    def _reach_all(self, target: int, kind: int) -> None:
        self._words[self._line + _DOES] = kind
        self._words[self._line + _FOR] = target
        self._fence()  # what this rank shows, and what it has read, before REACHED says so
        self._words[self._line + _REACHED] = target
        self._fence()  # REACHED before the loads of who sleeps
        self._rouse(self.group)
        if not self._arrived(target):
            self._until(lambda: self._arrived(target), kind, target)
        self._fence()  # the others' REACHED are loaded before what they show

    def _rouse(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self._words[rank * _LINE + _SLEEPS] and rank != self.rank:
                os.eventfd_write(self._wakes[rank], 1)

    def _arrived(self, target: int) -> bool:
        """Whether all others have reached *target*.  Raises: CollectiveError if one has left."""
        words = self._words
        for line in self._others:
            if words[line + _EPOCH] != self._epoch:
                return False
            if words[line + _REACHED] < target:
                if words[line + _LEFT] and words[line + _REACHED] < target:  # not even when it left
                    raise self._stranded(line // _LINE)
                return False
        return True

    def _until(self, condition: Callable[[], bool], kind: int, wanted: int) -> None:
        """Wait for *condition*; *kind* and *wanted* tell the other ranks what this one waits for."""
        if spin(condition):
            return
        words, line = self._words, self._line
        words[line + _DOES], words[line + _FOR] = kind, wanted
        poll = select.poll()
        poll.register(self._wakes[self.rank], select.POLLIN)
        one_to_one = kind in (_SEND, _RECV)

        def doze() -> bool:
            if one_to_one and self._left(wanted):
                if condition():
                    return True
                raise self._stranded(wanted)
            if poll.poll(_NAP):
                os.eventfd_read(self._wakes[self.rank])
                return False
            for rank in self.group:
                if not one_to_one and self._never_came(rank):
                    raise self._stranded(rank)
            if self._standstill():
                raise CollectiveError(self._who_waits())
            return False

        sleep_until(condition, words, line + _SLEEPS, self._fence, doze)

    def _left(self, rank: int) -> bool:
        if self._words[rank * _LINE + _EPOCH] != self._epoch:
            return self._never_came(rank)
        return self._words[rank * _LINE + _LEFT] != 0

    def _never_came(self, rank: int) -> bool:
        """Whether *rank* has ended this call without having come to the board."""
        if self._answered is None or not self._answered(rank, self._epoch):
            return False
        self._fence()  # the answer is loaded before EPOCH, which was stored before it
        return self._words[rank * _LINE + _EPOCH] != self._epoch

    def _stranded(self, rank: int) -> CollectiveError:
        """What to raise where *rank* has ended its function while this one waits for it."""
        failed = self._has_failed(rank * _LINE)
        how = "failed" if failed else "returned from the function"
        return CollectiveError(
            f"rank {rank} {how} without taking part in {self.where()}, in which rank {self.rank} "
            f"waited: every rank of a call must enter the same collectives in the same order.",
            strays=failed,
        )

    def _standstill(self) -> bool:
        """Whether nothing can change any more: all ranks have left, or wait for what cannot come."""
        before = self._seen_of_group()
        stuck = all(self._left(rank) or self._waits(rank) for rank in self.group)
        return stuck and self._seen_of_group() == before

    def _seen_of_group(self) -> bytes:
        """What the board says of the ranks of this call; others may be busy with calls of their own."""
        words, group = self._words, self.group
        lines = [words[rank * _LINE : (rank + 1) * _LINE] for rank in group]
        starts = [self._box(source, to) for source in group for to in group]
        return b"".join(map(bytes, [*lines, *(words[start : start + _BOX] for start in starts)]))

    def _waits(self, rank: int) -> bool:
        words, line = self._words, rank * _LINE
        if words[line + _EPOCH] != self._epoch or not words[line + _SLEEPS]:
            return False
        kind, wanted = words[line + _DOES], words[line + _FOR]
        if kind == _RECV:
            box = self._box(wanted, rank)
            return words[box + _SENT] == words[box + _RECEIVED] and not self._left(wanted)
        if kind == _SEND:
            box = self._box(rank, wanted)
            return self._full(box) and not self._left(wanted)
        late = [other for other in self.group if words[other * _LINE + _REACHED] < wanted]
        return bool(late) and not any(self._left(other) for other in late)

    def _who_waits(self) -> str:
        words = self._words
        doing = []
        for rank in self.group:
            kind, wanted = words[rank * _LINE + _DOES], words[rank * _LINE + _FOR]
            if self._left(rank):
                doing.append(f"rank {rank} has returned")
            elif kind in (_SEND, _RECV):
                way = "to" if kind == _SEND else "from"
                doing.append(f"rank {rank} is in {KINDS[kind]} {way} rank {wanted}")
            else:
                doing.append(f"rank {rank} is in {KINDS[kind]}, collective {wanted // _STEPS}")
        return (
            f"the ranks of this call wait for each other, and none can go on: {'; '.join(doing)}. Every "
            f"rank must enter the same collectives in the same order, and receive what is sent to it."
        )
