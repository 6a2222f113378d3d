"""Where the ranks of a call meet: each rank says what it does, and sees what the others do.

The state is on the ``board``; each rank writes only its own line::

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
The ranks of one colour have lines of their own (``members``); a rank's line on the board says in
``AMONG`` whom it meets now.

A rank waits as ``ipc.waiting`` says: it polls for a moment, and then sleeps on its eventfd.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..errors import CollectiveError, UsageError
from ..ipc.waiting import new_fence, sleep_until, spin
from ..memory.arena import Arena
from ..values.arrays import Array
from ..values.cache import Cache
from .board import FAILED, KINDS, LINE, RECV, RETURNED, SEND, SLOTS, STEPS, Board, Box, BoxSlot, Line
from .journal import Journal, shared_words
from .members import REACHED, Members, OwnRecord, board_words, found, name, new_board

_NONE = (1 << 64) - 1  # the number of no message

_NAP = 100  # milliseconds until a sleeper checks whether its wait can still end


class Meeting:
    """One rank's end of the place where the ranks of a call meet.

    Attributes:
        members: whom it meets: the ranks that take part in the running call, or some of them.
    """

    def __init__(
        self,
        board: memoryview,
        rank: int,
        size: int,
        arena: Arena,
        wakes: Sequence[int],
        answered: Callable[[int, int], bool] | None,
        journal: Journal | None = None,
    ) -> None:
        """*answered(rank, epoch)* tells whether a rank has replied to the command of that call.

        A *journal* is for sessions on several hosts, where *wakes* count for the ranks of this one.
        """
        self.rank = rank
        self._journal = journal
        self._near = range(size) if journal is None else journal.near
        self._words = shared_words(board.cast("Q"), 0, journal)
        self._line = rank * LINE
        self._arena = arena
        self._wakes = wakes
        self._own = self._new_records()
        self._fence = new_fence()
        self._board = Board(self._words, size, arena, self._fence, answered)
        self.members: Members = self._on_board((rank,))
        self._board.begin(0, self.members)
        self._parted: set[Members] = set()  # in this call
        self._boards: list[Array] = []  # of members whose first rank this is; others may read them
        self._blank: Array | None = None  # offered in vain: it can be offered again
        self._seen: Cache[tuple[int, int], memoryview] = Cache()
        self._announced = False
        self._unfinished = False
        self._posting: set[int] = set()  # the ranks that this call has sent something to
        self._name = ""

    # ── a call ───────────────────────────────────────────────────────────────────────────────────

    def begin(self, epoch: int, ranks: tuple[int, ...]) -> None:
        """A call begins, in which *ranks* take part; *epoch* grows from call to call."""
        everyone = self._board.all
        self.members = everyone if ranks == everyone.ranks else self._on_board(ranks)
        self.members.begin()
        self._board.begin(epoch, self.members)
        self._parted.clear()
        self._boards.clear()  # no rank is in that call any more
        self._announced = self._unfinished = False

    def end(self, failed: bool) -> None:
        """The call has ended on this rank, which wakes the ranks that wait for it.

        A rank that never came to the board, and did not fail, writes nothing: its reply shows it.
        """
        if not (self._announced or failed or self._board.answered is None):
            return
        if not self._announced:
            self._announce()
        self._leave(FAILED if failed else RETURNED)
        self._wake(self._board.all.ranks)

    def _announce(self) -> None:
        """Come to the board: the first time in a call."""
        self._announced = True
        self._posting.clear()
        self._words[self._line + Line.MEMBER + REACHED] = 0
        self._words[self._line + Line.AMONG] = 0
        self._leave(0)

    def _leave(self, how: int) -> None:
        self._words[self._line + Line.LEFT] = how
        self._fence()  # LEFT (and REACHED) before EPOCH, which makes them count
        self._words[self._line + Line.EPOCH] = self._board.epoch
        self._fence()  # EPOCH before the loads of who sleeps, in _wake

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
        members = self.members
        members.enter(payload, self._arena)
        self._name = KINDS[kind]
        self._reach_all(members.count * STEPS, kind)
        return [
            payload if line == members.line else self._record_of(members, line) for line in members.lines
        ]

    def step(self) -> None:
        """Wait until all ranks have come to the next step."""
        self._reach_all(self._reached + 1, self._words[self._line + Line.DOES])

    def part(self) -> None:
        """End the collective: wait until no rank reads another's memory any more."""
        self._reach_all(self.members.count * STEPS + STEPS - 1, self._words[self._line + Line.DOES])
        self._unfinished = False

    def pass_on(self) -> None:
        """End the collective without a wait, if no rank reads another's memory in it."""
        self._unfinished = False

    def mark(self) -> None:
        """Come to the next step without waiting for the others."""
        self.members.words[self.members.line + REACHED] += 1
        self._fence()  # REACHED before this rank begins to move data

    def behind(self) -> list[int]:
        """The ranks that have not come as far as this one."""
        return [rank for rank in self.members.ranks if self.members.reached(rank) < self._reached]

    def overtaken(self) -> bool:
        """Whether another rank has come further than this one."""
        return any(self.members.reached(rank) > self._reached for rank in self.members.ranks)

    def failed(self) -> bool:
        """Whether the function of another rank has failed in this call."""
        return any(self._board.failed(rank) for rank in self.members.ranks if rank != self.rank)

    @property
    def _reached(self) -> int:
        return self.members.words[self.members.line + REACHED]

    def where(self) -> str:
        """The running collective, in words."""
        if self._name.startswith(("send", "recv")):
            return self._name
        return f"{self._name} (collective {self.members.count} of {self.members.called()})"

    def entry(self) -> tuple[int, str]:
        """The number of the call, and the collective that it has entered last, in words."""
        members = self.members
        of = f" of {members.called()}" if members.at else ""
        return self._board.epoch, f"{self._name} (collective {members.count}{of})"

    def _record_of(self, members: Members, line: int) -> bytes:
        place = members.shown_at(line)
        memory = self._seen.get(place)
        if memory is None:
            memory = self._seen[place] = self._arena.view(place[0], (place[1],), np.uint8).data
        return memory.tobytes()

    # ── members ──────────────────────────────────────────────────────────────────────────────────

    def _on_board(self, ranks: tuple[int, ...]) -> Members:
        lines = [rank * LINE + Line.MEMBER for rank in ranks]
        return Members(self.rank, ranks, self._words, lines, self._own)

    def _new_records(self) -> list[OwnRecord]:
        return [OwnRecord(self._arena, 2048, self._journal) for _ in range(2)]

    def offer(self) -> int:
        """Memory for the lines of members whose first rank this one may be; returns where it lies."""
        board, self._blank = self._blank, None
        if board is None or len(board) < board_words(len(self.members.ranks)):
            board = new_board(self._arena, len(self.members.ranks))
        self._boards.append(board)
        return self._arena.place(board)

    def join(self, ranks: tuple[int, ...], at: int) -> Members | None:
        """End the collective, and part: *ranks* meet *at* what their first one has offered.

        This one is among them.  None if there are none.
        """
        if ranks[:1] == (self.rank,):
            name(shared_words(self._boards[-1].data.cast("B").cast("Q"), at, self._journal), ranks)
        else:
            self._blank = self._boards.pop()
        self.part()
        if not ranks:
            return None
        members = found(self._arena, at, self.rank, self._new_records(), self._journal)
        self._parted.add(members)
        return members

    @contextmanager
    def among(self, members: Members) -> Iterator[None]:
        """Until the end of the block, this rank meets *members*, who are those of this call or parted.

        Raises: UsageError if they parted in another call.
        """
        if not members.at and members.ranks == self._board.all.ranks:
            members = self._board.all
        elif members.at and members not in self._parted:
            raise UsageError(
                f"{members.called()} was made in another call: its ranks may do something else by now. "
                f"Call split() in each call, in the function that uses what it returns."
            )
        before = self.members
        try:
            self._meet_among(members)
            yield
        finally:
            self._meet_among(before)

    def _meet_among(self, members: Members) -> None:
        if members is not self.members:
            self.members = members
            self._words[self._line + Line.AMONG] = members.at

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def post(self, to: int, at: int) -> int:
        """Put a message (the offset of a block) into the box for rank *to*; returns its number.

        Waits while the box is full.  Raises: CollectiveError if it will never be emptied.
        """
        if not self._announced:
            self._announce()
        words, box = self._words, self._board.box(self.rank, to)
        self._name = f"send to rank {to}"
        if to not in self._posting:  # what is left of earlier calls does not count
            self._posting.add(to)
            words[box + Box.FIRST] = words[box + Box.SENT]
        self._until(lambda: not self._board.full(box), SEND, to)
        number = words[box + Box.SENT]
        slot = box + Box.FIRST_SLOT + BoxSlot.WORDS * (number % SLOTS)
        words[slot + BoxSlot.NUMBER] = _NONE
        self._fence()  # "no message" before its parts change; pairs with the last look in fetch
        words[slot + BoxSlot.AT], words[slot + BoxSlot.OF_EPOCH] = at, self._board.epoch
        self._fence()  # the parts before the number that makes them count
        words[slot + BoxSlot.NUMBER] = number
        self._fence()  # the slot before SENT, by which the receiver finds it
        words[box + Box.SENT] = number + 1
        self._fence()  # SENT before the load of whether the receiver sleeps
        self._wake([to])
        return number

    def fetch(self, source: int) -> int:
        """Wait for the next message of rank *source*; returns what it posted."""
        if not self._announced:
            self._announce()
        words, box = self._words, self._board.box(source, self.rank)
        self._name = f"recv from rank {source}"
        while True:
            self._until(lambda: words[box + Box.SENT] != words[box + Box.RECEIVED], RECV, source)
            self._fence()  # SENT is loaded before the slot
            number = words[box + Box.RECEIVED]
            slot = box + Box.FIRST_SLOT + BoxSlot.WORDS * (number % SLOTS)
            fresh = words[slot + BoxSlot.NUMBER] == number
            self._fence()  # the number is loaded before the parts
            fresh = fresh and words[slot + BoxSlot.OF_EPOCH] == self._board.epoch
            at = words[slot + BoxSlot.AT]
            self._fence()  # the parts are loaded before the second look at the number
            if fresh and words[slot + BoxSlot.NUMBER] == number:
                return at
            self.fetched(source)  # one of an earlier call, which nobody received

    def fetched(self, source: int) -> None:
        """The message has been read: its sender may have its memory back."""
        self._fence()  # the message is read before RECEIVED gives its memory back
        self._words[self._board.box(source, self.rank) + Box.RECEIVED] += 1
        self._fence()  # RECEIVED before the load of whether the sender sleeps
        self._wake([source])

    def received(self, to: int) -> int:
        """How many of the messages posted to rank *to* have been read."""
        return self._words[self._board.box(self.rank, to) + Box.RECEIVED]

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    def _reach_all(self, target: int, kind: int) -> None:
        members = self.members
        self._words[self._line + Line.DOES] = kind
        self._words[self._line + Line.FOR] = target
        self._fence()  # what this rank shows, and what it has read, before REACHED says so
        members.words[members.line + REACHED] = target
        self._fence()  # REACHED before the loads of who sleeps
        self._wake(members.ranks)
        if not self._arrived(target):
            self._until(lambda: self._arrived(target), kind, target)
        self._fence()  # the others' REACHED are loaded before what they show

    def _wake(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self._words[rank * LINE + Line.SLEEPS] and rank != self.rank and rank in self._near:
                os.eventfd_write(self._wakes[rank], 1)

    def _arrived(self, target: int) -> bool:
        """Whether all others have reached *target*.  Raises: CollectiveError if one has left."""
        words, members = self._words, self.members
        shown, arrived = members.words, True
        epoch = self._board.epoch
        for rank, line in members.others:
            if words[rank * LINE + Line.EPOCH] != epoch:
                arrived = False
            elif shown[line + REACHED] < target:
                # not even at its end
                if words[rank * LINE + Line.LEFT] and shown[line + REACHED] < target:
                    raise self._stranded(rank)
                arrived = False  # another one may have left
        return arrived

    def _until(self, condition: Callable[[], bool], kind: int, wanted: int) -> None:
        """Wait for *condition*; *kind* and *wanted* tell the other ranks what this one waits for."""
        if spin(condition):
            return
        words, line = self._words, self._line
        words[line + Line.DOES], words[line + Line.FOR] = kind, wanted
        poll = select.poll()
        poll.register(self._wakes[self.rank], select.POLLIN)
        one_to_one = kind in (SEND, RECV)
        judged = time.monotonic()

        def nap() -> bool:
            nonlocal judged
            if one_to_one and self._board.left(wanted):
                if condition():
                    return True
                raise self._stranded(wanted)
            if poll.poll(_NAP):
                os.eventfd_read(self._wakes[self.rank])
                if time.monotonic() - judged < _NAP / 1000:
                    return False  # else others of its host may keep it from ever judging
            judged = time.monotonic()
            if condition():
                return True
            for rank in self.members.ranks:
                if not one_to_one and self._board.never_came(rank):
                    raise self._stranded(rank)
            if self._board.standstill():
                raise CollectiveError(self._board.who_waits())
            return False

        sleep_until(condition, words, line + Line.SLEEPS, self._fence, nap)

    def _stranded(self, rank: int) -> CollectiveError:
        """What to raise where *rank* has ended its function while this one waits for it."""
        failed = self._board.failed(rank)
        how = "failed" if failed else "returned from the function"
        return CollectiveError(
            f"rank {rank} {how} without taking part in {self.where()}, in which rank {self.rank} "
            f"waited: every rank of a call must enter the same collectives in the same order.",
            strays=failed,
        )
