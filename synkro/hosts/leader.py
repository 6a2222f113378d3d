"""The process of MPI's on a host other than the main process's, and the workers of that host.

The leader drives the same engine room as the main process does on its host: a pool, and the channel to
it.  Commands come with what they read, answers go with what they have written.  In the place of the main
process's segments there are mirrors.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from ..devices.gpus import showing, visible
from ..errors import NotAvailable, SessionError, SharedMemoryError
from ..ipc.channel import Lane
from ..ipc.waiting import Nap
from ..memory.keeper import Keeper
from ..memory.segment import check_descriptors, descriptors_for, undoing
from ..messages import Command, Housekeeping, Reduce, Reply, Start, Work
from ..plan.extents import Extent, Partial, View
from ..values.cache import Unpickled
from . import protocol
from .cleanup import UNHEARD
from .mirror import Mirrors
from .parcels import Load, discard, large, pack, unpack, unpack_values
from .pool import LeaderPool, hello
from .relay import WireRelay
from .seals import ForgedError, LostError, SilenceError
from .tasks import LocalTasks
from .wire import GATEWAY, Wire, library

_PATIENCE = 5e-3  # seconds that ranks which have answered wait for the others of their host
_GRACE = 1.0  # seconds in which workers can leave by themselves
_LOOK = 5e-3  # seconds after which a leader that does not sleep looks around
_REPORT = 50e-3  # seconds between two reports of what the ranks do
_ENDING = 10.0  # seconds in which the gateway can have all processes ended

_Writing = tuple[list[Extent], list[Partial]]


class _Running:
    """A command that has not been answered by all ranks of the host."""

    def __init__(self, lane: Lane, command: Command) -> None:
        self.lane = lane
        self.command = command
        self._told: set[int] = set()  # the ranks whose answers have been sent
        self._since = 0.0  # when the first of the others was seen

    def has_news(self) -> bool:
        """Whether a rank has answered whose answer has not been sent."""
        return len(self.lane.unanswered()) + len(self._told) < len(self.lane.ranks)

    @property
    def done(self) -> bool:
        """Whether no rank's answer is missing any more."""
        return len(self._told) == len(self.lane.ranks)

    def answers(self) -> list[int]:
        """The ranks whose answers are to be sent now.

        Those of all ranks go together, if that does not take long: what they reduce is theirs together.
        """
        late = self.lane.unanswered()
        answered = [r for r in self.lane.ranks if r not in late and r not in self._told]
        if late and answered:
            now = time.monotonic()
            self._since = self._since or now
            if now - self._since < _PATIENCE or isinstance(self.command, Reduce):
                return []
        self._told.update(answered)
        self._since = 0.0
        return answered


class LeaderSession:
    """The workers of one host other than the main process's, from ``Begin`` to the end of a session.

    Attributes:
        over: whether they have been dismissed.
    """

    def __init__(self, wire: Wire, begin: protocol.Begin, environment: dict[str, str]) -> None:
        """*environment* is the main process's.

        Raises: SessionError, SharedMemoryError if they cannot be started; NotAvailable.
        """
        self._wire = wire
        self._fill = partial(wire.fill, GATEWAY)
        self._printed: deque[tuple[int, str, bytes]] = deque()  # which a thread reads
        with descriptors_for("the workers could not be started"):
            self._pool = LeaderPool(begin.hosts, wire.number, self._printed.append)
        self._mirrors = Mirrors()
        self._view = View(self._mirrors.array, begin.trusted)
        # by segment: the ranks that have its descriptor
        self._having: defaultdict[int, set[int]] = defaultdict(set)
        self._commands: dict[tuple[int, ...], bytes] = {}  # the last one, by ranks
        self._known = Unpickled[Command]()
        self._replies = Unpickled[Reply]()
        # what was written last, behind the replies, the command, and the ranks that have answered
        self._writings: dict[Lane, tuple[list[bytes], Command, list[int], _Writing]] = {}
        self._sent: dict[int, bytes] = {}  # by rank: the last reply that went to the gateway
        self._running: dict[int, _Running] = {}
        self._marked: dict[int, int] = {}  # during a trace: by rank, how many marks have been told
        self._tasks: LocalTasks | None = None  # from the first map on
        self._doing: dict[int, tuple[int, int]] = {}
        self._looked = self._reported = 0.0
        self.over: bool = False
        self._ends = select.epoll()  # of the workers that have not ended
        beyond = begin.environments
        environments = [environment | beyond[rank] | showing() for rank in self._pool.ranks]
        with undoing(self._pool.close):
            self._channel = self._pool.start(environments, begin.board)
        self._relay = WireRelay(wire, begin.hosts, self._pool.inherited, self._channel.answered)
        for sentinel in self._pool.sentinels:
            self._ends.register(sentinel, select.EPOLLIN)
        wire.send(GATEWAY, protocol.Begun(self._pool.pids))

    # ── a command ────────────────────────────────────────────────────────────────────────────────

    def hear(self, source: int, message: object) -> None:
        """A message has come: of the gateway's, or what ranks of another host do."""
        match message:
            case protocol.Ordered():
                self._order(message)
            case protocol.Wanted(segment):
                self._wire.send(GATEWAY, protocol.Looked(segment, self._mirrors.share(*message)))
            case protocol.Traced(on):
                self._channel.trace(on)
                self._marked = {rank: self._channel.marked(rank) for rank in self._pool.ranks if on}
            case protocol.Tick(sent):
                self._wire.send(GATEWAY, protocol.Tock(sent, time.perf_counter_ns()))
            case protocol.Shown():
                self._relay.take(source, message)
            case protocol.Ended(numbers):
                self._channel.note_answered(numbers)
            case protocol.Offered() if self._tasks is not None:
                self._tasks.accept(message, self._fill)
            case protocol.Offered():  # there is no queue for them
                unpack_values(message.values, self._fill)
            case protocol.Recall(number) if self._tasks is not None:
                self._tasks.recall(number)
            case protocol.GiveUp(number, rank):
                self._interrupt(number, rank)
            case protocol.UserAnswer(rank, number, line):
                self._pool.answer(rank, number, line)
            case protocol.End():
                self.dismiss()

    def _order(self, ordered: protocol.Ordered) -> None:
        """Hand a command to its ranks."""
        payload = ordered.command or self._commands[ordered.ranks]
        self._commands[ordered.ranks] = payload
        try:
            if ordered.housekeeping:
                self._keep_house(pickle.loads(ordered.housekeeping), ordered.ranks)
            for piece in large(ordered.parcel):
                if isinstance(piece, Extent):
                    self._mirrors.reserve(piece)
        except SharedMemoryError as error:
            discard(ordered.parcel, self._fill)
            self._refuse(ordered, error)
            return
        unpack(ordered.parcel, self._mirrors.memory, self._fill)
        command = self._known[payload]
        if isinstance(command, Start):
            self._view.begin(command.outbox, command.versions if command.gpus else None)
            self._mirrors.keep(command.outbox.segment)
        work = command.inner(self._view)
        if isinstance(work, Work):
            try:
                self._begin_map(ordered.number, work)
            except (SessionError, SharedMemoryError) as error:
                self._refuse(ordered, error)
                return
        lane = self._channel.lane(ordered.ranks)
        lane.send(payload, ordered.housekeeping, ordered.number)
        self._running[ordered.number] = _Running(lane, command)

    def _keep_house(self, news: Housekeeping, ranks: Sequence[int]) -> None:
        for number in news.drop:
            self._mirrors.drop(number)
            self._having.pop(number, None)
        found = [(new.segment, self._mirrors.descriptor(new.segment, new.nbytes)) for new in news.attach]
        for rank in ranks:
            lacking = [(number, fd) for number, fd in found if rank not in self._having[number]]
            for number, _ in lacking:
                self._having[number].add(rank)
            self._pool.pass_descriptors(rank, lacking)

    def _begin_map(self, number: int, work: Work) -> None:
        """Open the queue of tasks.  Raises: SessionError, SharedMemoryError."""
        if self._tasks is None:
            ranks, size = self._pool.ranks, sum(map(len, self._pool.hosts))
            try:
                self._tasks = LocalTasks(self._wire, size, self._channel)
            except OSError as error:
                what = f"the queue of tasks of ranks {ranks[0]} to {ranks[-1]} could not be made"
                check_descriptors(error, what)
                raise SessionError(f"{what} ({error}).") from None
            for rank in ranks:
                queue = zip(work.queue, self._tasks.descriptors, strict=True)
                self._pool.pass_descriptors(rank, list(queue))
        self._tasks.begin(number)

    def _refuse(self, ordered: protocol.Ordered, problem: Exception) -> None:
        """Answer for the ranks, which have not heard of the command."""
        replies: dict[int, bytes | None] = dict.fromkeys(ordered.ranks, protocol.refusal(problem))
        self._sent |= dict.fromkeys(ordered.ranks, b"")
        self._wire.send(GATEWAY, protocol.Answered(ordered.number, replies, None, ()))

    def _interrupt(self, number: int, rank: int) -> None:
        """Have a rank give up command *number*."""
        running = self._running.get(number)
        if running is not None:
            if self._tasks is not None:
                self._tasks.stop()
            running.lane.give_up()
            self._channel.wake_all()
            if rank in running.lane.unanswered():
                self._pool.interrupt([rank])

    # ── what becomes of it ───────────────────────────────────────────────────────────────────────

    def called(self) -> bool:
        """Whether all ranks have answered a command, or show others something."""
        for running in self._running.values():
            if running.lane.all_answered():
                return True
        return self._relay.called()

    def step(self) -> bool:
        """Look at the workers, and tell the gateway what is new; returns whether something was."""
        if time.monotonic() - self._looked > _LOOK:
            self._look_around()
        news = self._relay.step(lambda: bool(self._running))
        news |= self._tasks is not None and self._tasks.step()
        for number, running in tuple(self._running.items()):
            answered = running.answers()
            if running.done:
                del self._running[number]
            if answered:
                news = True
                self._answer(number, running, answered)
        return news

    def _answer(self, number: int, running: _Running, ranks: list[int]) -> None:
        if self._tasks is not None:
            self._tasks.flush()  # results of a map come before the answers
        self._relay.step(lambda: True)  # what these ranks have shown goes before their answers
        self._tell_marks()
        if self._channel.take_logged():  # and so does what they have logged
            self._pool.hear_logs()
            self._tell_what_was_printed()
        listed = running.lane.replies()
        payloads = dict(zip(running.lane.ranks, listed, strict=True))
        pieces, partials = self._written(running, ranks, listed, payloads)
        parcel, loads = pack(pieces, self._mirrors.memory)
        for part in partials:
            values = self._mirrors.array(part.target).reshape(-1).view(np.uint8)
            loads.append(Load([values], not part.bare))
        if self._tasks is not None and self._tasks.problem is not None:
            payloads |= dict.fromkeys(ranks, protocol.refusal(self._tasks.problem))
        for rank in ranks:
            self._doing.pop(rank, None)  # the gateway knows that they do nothing
        new = {rank: payloads[rank] for rank in ranks if self._sent.get(rank) != payloads[rank]}
        self._sent |= new
        said = {rank: new.get(rank) for rank in ranks}
        answered = protocol.Answered(number, said, parcel, tuple(partials))
        if self._wire.send(GATEWAY, answered, *loads) is not None:
            self._wire.flush()  # the next command may write there

    def _written(
        self, running: _Running, ranks: list[int], listed: list[bytes], payloads: dict[int, bytes]
    ) -> _Writing:
        """What *ranks* have written, by the replies of their lane: as *listed* there, and by rank."""
        lane, command = running.lane, running.command
        last = self._writings.get(lane)
        if last is not None and last[0] is listed and last[1] is command and last[2] == ranks:
            return last[3]
        replies = {rank: self._replies[payloads[rank]] for rank in ranks}
        written = self._view.writes(command, replies)
        extents = [piece for piece in written if isinstance(piece, Extent)]
        found = extents, [piece for piece in written if isinstance(piece, Partial)]
        self._writings[lane] = listed, command, ranks, found
        return found

    def sleeping(self, nap: Nap) -> None:
        """Do *nap*, which ends when one of the descriptors that it gets is readable; then tell the
        gateway what is new."""

        def has_news() -> bool:  # whether a rank has answered of whom the gateway does not know
            return any(running.has_news() for running in self._running.values())

        lanes = [running.lane for running in self._running.values()]
        self._relay.sleeping(
            lambda wakes: self._channel.sleeping(
                lanes, has_news, lambda more: nap([*wakes, *more, self._ends.fileno()])
            )
        )
        self._look_around()

    def _look_around(self) -> None:
        """Tell the gateway who has ended, what was printed, and what the ranks do."""
        self._looked = now = time.monotonic()
        for sentinel, _ in self._ends.poll(0):
            self._ends.unregister(sentinel)
            ended = self._pool.end_of(sentinel)
            self._tell_what_was_printed()
            self._wire.send(GATEWAY, ended)
        self._tell_what_was_printed()
        if self._running and now - self._reported > _REPORT:
            self._reported = now
            self._tell_marks()
            doing = {rank: self._channel.whereabouts(rank) for rank in self._pool.ranks}
            news = tuple((r, *what) for r, what in doing.items() if self._doing.get(r) != what)
            self._doing |= doing
            if news:
                self._wire.send(GATEWAY, protocol.Standing(news))

    def _tell_marks(self) -> None:
        """Tell the gateway of the marks that the ranks have left, during a trace."""
        for rank, told in self._marked.items():
            self._marked[rank] = self._channel.marked(rank)
            if self._marked[rank] > told:
                self._wire.send(GATEWAY, protocol.Marks(rank, tuple(self._channel.marks(rank, told))))

    def _tell_what_was_printed(self) -> None:
        while self._printed:
            self._wire.send(GATEWAY, protocol.Printed(*self._printed.popleft()))

    def dismiss(self) -> None:
        """End the workers that have not ended; the second time it does nothing."""
        if self.over:
            return
        self.over = True
        self._pool.ended(_GRACE)
        self._pool.close()
        if self._tasks is not None:
            self._tasks.close()
        self._tell_what_was_printed()

    def close(self) -> None:
        """End the workers that have not ended, and give everything back."""
        self.dismiss()
        self._mirrors.close()
        self._relay.close()
        self._ends.close()


class Leader:
    """Answers the gateway."""

    def __init__(self, wire: Wire, keeper: Keeper, environment: dict[str, str]) -> None:
        """*keeper* is this process's, *environment* the main process's, if that has come here."""
        self._wire = wire
        self._keeper = keeper
        self._take_over(environment)

    def _take_over(self, environment: dict[str, str]) -> None:
        """Have the main process's variables, too, but for those that are set here."""
        self._environment = environment
        for name, value in environment.items():
            os.environ.setdefault(name, value)

    def serve(self) -> None:
        """Answer one message after the other, until the last."""
        try:
            source, question = self._wire.next()
            while not isinstance(question, protocol.Leave):
                self._answer(source, question)
                source, question = self._wire.next()
            self._wire.leave()
        except LostError as error:
            self._complain(error)

    def _work(self, begin: protocol.Begin) -> None:
        """Serve a session until its end."""
        self._wire.live(begin.host_timeout)
        try:
            session = LeaderSession(self._wire, begin, self._environment)
        except (SessionError, SharedMemoryError, NotAvailable) as error:
            self._wire.send(GATEWAY, protocol.Begun((), str(error)))
            self._wire.part()
            return
        try:
            while not session.over:
                self._wire.rest(session.called, session.step, session.sleeping)
                while (message := self._wire.receive()) is not None:
                    session.hear(*message)
            self._wire.part()
        except SilenceError as error:
            self._complain(error)  # before the workers have ended, which may take long
        finally:
            session.close()

    def _complain(self, error: LostError) -> NoReturn:
        """A host is lost: have the gateway know, and wait until it has ended all."""
        try:
            if isinstance(error, SilenceError) and error.host == GATEWAY:
                raise error
            self._wire.send_last(error)
        except SilenceError:  # the gateway is not heard, and MPI would wait for it
            print(UNHEARD, file=sys.stderr, flush=True)
            self._keeper.beat(0)  # mpiexec's process on this host may hear nothing either
            os._exit(1)  # which ends the workers
        except ForgedError:
            pass  # another one
        time.sleep(_ENDING)
        self._keeper.exits()
        os._exit(1)

    def _answer(self, source: int, question: Any) -> None:
        match question:
            case protocol.Begin():
                self._work(question)
                gc.collect()  # the mirrors
            case protocol.Hail():
                if question.environment is not None:
                    self._take_over(question.environment)
                self._wire.send(GATEWAY, hello(question, library()))
            case protocol.AskGpus(shown):
                self._wire.send(GATEWAY, visible(shown))
            case protocol.Reach(_, other):
                self._wire.send(other, protocol.Echo(0))
                self._wire.next()
                self._wire.send(GATEWAY, True)
            case protocol.Echo(nbytes, path):
                body = np.empty(nbytes, np.uint8)
                self._wire.fill(source, [body], sealed=False)
                answer = time.time(), bool(path) and os.path.exists(path)
                self._wire.send(source, answer, Load([body], sealed=False))
                self._wire.flush()
