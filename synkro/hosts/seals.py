"""Digests under the key of the session: what comes is believed if it is what was sent, here and now.

::

    head   digest of the payload │ its number │ its length │ payload
    load   the bodies, chunk by chunk │ digest of all of them
    beat   digest of nothing │ its number │ how many heads were sent before

A digest is BLAKE2b's, under a key for one way from one process to another, which nobody else uses.  It
covers the number of the message on that way, and for loads which of the message's it is.  So nothing can
be changed, cut off, left out, sent again, sent to others, or put in the place of something else.  Where
nothing follows on what was left out, the next beats tell.

A load is digested while it travels: the sender has digested a chunk when that goes, the receiver one
when the next is on its way.  Nothing of it is used for anything but numbers before its digest has come.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from typing import Any, Final

Buffer = Any  # whatever has contiguous bytes: a memoryview, an array of uint8
Digest = Any  # of hashlib's

DIGEST_BYTES = 32

_NUMBERS = struct.Struct("<QQ")
_PREFIX = DIGEST_BYTES + _NUMBERS.size
_COUNT = _NUMBERS.size // 2  # bytes of the second of them
_HEAD, _LOAD, _BEAT = b"head", b"load", b"beat"

CHANGED = "is not the one that was sent: it was changed, cut off, or another took its place (spliced)"
CUT = "is shorter than it was sent (truncated)"
LONG = "is longer than it was sent (spliced)"
REPLAYED = "has come before, and was sent again by somebody else (replayed)"
EARLY = "has come before others that were sent earlier (reordered), or these were left out"
LEFT_OUT = "has not come, though others have that were sent later (left out)"
REDIRECTED = "was sent by another host, or to another one (redirected)"


class LostError(Exception):
    """A host is lost, by what process *at* hears of process *host*; the others get this as a message.

    Attributes:
        host: the process as whose message something came, or should have come.
        at: the process to which it came.
        what: the end of a sentence about it, as those above.
    """

    def __init__(self, host: int, at: int, what: str = LEFT_OUT) -> None:
        super().__init__(host, at, what)
        self.host: Final = host
        self.at: Final = at
        self.what: Final = what

    def __str__(self) -> str:
        return f"a message from process {self.host} of MPI's to process {self.at} {self.what}."


class SilenceError(LostError):
    """Nothing is heard of a host any more."""


class ForgedError(LostError):
    """A message is not what the process at the other end has sent, here and now."""


class Seals:
    """The digests of one process's messages, to others and from them."""

    def __init__(self, key: bytes, number: int, count: int) -> None:
        """*number* is this process's, one of *count* that all have the *key*."""
        self._number = number
        ways = itertools.product(range(count), repeat=2)
        self._keys = {way: hashlib.blake2b(_NUMBERS.pack(*way), key=key).digest() for way in ways}
        self._sent, self._loads, self._beaten = ([0] * count for _ in range(3))
        self._came, self._filled, self._heard = ([0] * count for _ in range(3))
        self._said = [0] * count  # how many heads others have sent, by their last beats

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def head(self, to: int, payload: bytes) -> bytes:
        """The next message to a process."""
        self._sent[to] = number = self._sent[to] + 1
        self._loads[to] = 0
        return _prefix(self._keys[self._number, to], number, payload) + payload

    def load_to(self, to: int) -> Digest:
        """What digests the next load of the last message to a process."""
        self._loads[to] += 1
        return _digest(self._keys[self._number, to], _LOAD, self._sent[to], self._loads[to])

    def beat(self, to: int) -> bytes:
        """The next beat for a process."""
        self._beaten[to] += 1
        return _beat(self._keys[self._number, to], self._beaten[to], self._sent[to])

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def opened(self, source: int, message: memoryview) -> memoryview:
        """The payload of the next message from a process.  Raises: ForgedError."""
        key, expected = self._keys[source, self._number], self._came[source] + 1
        payload = message[_PREFIX:]
        if not hmac.compare_digest(message[:_PREFIX], _prefix(key, expected, payload)):
            raise ForgedError(source, self._number, self._what(source, message))
        self._came[source], self._filled[source] = expected, 0
        return payload

    def load_from(self, source: int) -> Digest:
        """What digests the next load of the last message from a process."""
        self._filled[source] += 1
        return _digest(self._keys[source, self._number], _LOAD, self._came[source], self._filled[source])

    def check_load(self, source: int, digest: Digest, said: Buffer) -> None:
        """Compare a load's digest with the one that came.  Raises: ForgedError."""
        if not hmac.compare_digest(digest.digest(), said):
            raise ForgedError(source, self._number, CHANGED)

    def check_beat(self, source: int, said: Buffer) -> bool:
        """The next beat of a process has come.  Returns whether a head has not been opened that was sent
        before the beat before: it has come, or was left out.  Raises: ForgedError."""
        self._heard[source] = number = self._heard[source] + 1
        sent = int.from_bytes(said[-_COUNT:], "little")
        if not hmac.compare_digest(_beat(self._keys[source, self._number], number, sent), said):
            raise ForgedError(source, self._number, CHANGED)
        before, self._said[source] = self._said[source], sent
        return before > self._came[source]

    def _what(self, source: int, message: memoryview) -> str:
        """What has happened to a head that is not the next one."""
        if len(message) < _PREFIX:
            return CUT
        number, length = _NUMBERS.unpack(message[DIGEST_BYTES:_PREFIX])
        payload = message[_PREFIX:]
        if len(payload) != length:
            return CUT if len(payload) < length else LONG
        for way, key in self._keys.items():
            if hmac.compare_digest(message[:_PREFIX], _prefix(key, number, payload)):
                if way != (source, self._number):
                    return REDIRECTED
                return REPLAYED if number <= self._came[source] else EARLY
        return CHANGED


def _prefix(key: bytes, number: int, payload: Buffer) -> bytes:
    """What stands before the payload of a head."""
    digest = _digest(key, _HEAD, number, 0, payload).digest()
    return bytes(digest + _NUMBERS.pack(number, len(payload)))


def _beat(key: bytes, number: int, sent: int) -> bytes:
    """Beat *number*, before which so many heads were *sent*."""
    return bytes(_digest(key, _BEAT, number, sent).digest() + _NUMBERS.pack(number, sent))


def _digest(key: bytes, kind: bytes, number: int, place: int, data: Buffer = b"") -> Digest:
    return hashlib.blake2b(
        data, key=key, person=kind, salt=_NUMBERS.pack(number, place), digest_size=DIGEST_BYTES
    )
