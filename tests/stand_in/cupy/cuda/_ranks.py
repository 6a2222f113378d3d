"""How the ranks of a communicator meet, and what each of their operations does, through files.

Every rank puts what it contributes to an operation into a file of the folder that is named by the
unique id, and computes the result itself, in an order that is the same for all and that changes from
element to element, as around a ring. An operation is complete when all ranks have done their part.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile

import numpy as np

from . import memory

INVALID_ARGUMENT = 4
INVALID_USAGE = 5

_TYPES = {
    0: np.int8,
    1: np.uint8,
    2: np.int32,
    3: np.uint32,
    4: np.int64,
    5: np.uint64,
    6: np.float16,
    7: np.float32,
    8: np.float64,
}
_BFLOAT16 = 9
SUM, PROD, MAX, MIN, AVG = range(5)
_PAIRWISE = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum, AVG: np.add}


def dtype_of(datatype):
    """NumPy's dtype for a number of NCCL's, or None where there is none."""
    if datatype == _BFLOAT16:
        try:
            import ml_dtypes
        except ImportError:
            return None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_TYPES[datatype]) if datatype in _TYPES else None


def reduce_all(parts, op):
    """Combine one array per rank: element i starts with rank i modulo their number.

    Maximum and minimum drop NaN. A mean of floats scales before it adds, one of integers divides
    afterwards, rounding towards zero. Halves are combined in single precision.
    """
    dtype, count = parts[0].dtype, len(parts)
    floating = dtype.kind not in "iu"
    pairwise = {MAX: np.fmax, MIN: np.fmin}.get(op, _PAIRWISE[op]) if floating else _PAIRWISE[op]
    if floating and dtype.itemsize < 4:
        parts = [part.astype(np.float32) for part in parts]
    with np.errstate(all="ignore"):
        if op == AVG and floating:
            parts = [part * part.dtype.type(1 / count) for part in parts]
        result = np.empty_like(parts[0])
        for first in range(min(count, result.size)):
            total = parts[first][first::count]
            for step in range(1, count):
                total = pairwise(total, parts[(first + step) % count][first::count])
            result[first::count] = total
        if op == AVG and not floating:
            result = np.where(result < 0, -(-result // count), result // count)
        return result.astype(dtype)


class Folder:
    """The folder in which the ranks of one unique id meet."""

    def __init__(self, unique_id, size, rank):
        root = os.environ.get("FAKE_CUDA_FOLDER") or tempfile.gettempdir()
        self.path = os.path.join(root, f"stand-in-nccl-{unique_id[:16].hex()}")
        self.size, self.rank = size, rank
        os.makedirs(self.path, exist_ok=True)

    def _at(self, name):
        return os.path.join(self.path, name)

    def write(self, name, header, payload=b""):
        """Put a file there, all at once."""
        draft = self._at(f"draft-{self.rank}-{name}")
        with open(draft, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(payload)
        os.replace(draft, self._at(name))

    def read(self, name):
        """The header and the payload of a file."""
        with open(self._at(name), "rb") as file:
            return json.loads(file.readline()), file.read()

    def has(self, name):
        """Whether a file is there."""
        return os.path.exists(self._at(name))

    def has_all(self, stem):
        """Whether all ranks have put their file of this kind there."""
        return all(self.has(f"{stem}-{rank}") for rank in range(self.size))

    def remove(self, name):
        """Take a file away."""
        os.unlink(self._at(name))

    def leave(self):
        """Say that this rank needs the folder no more; the last one removes it."""
        try:
            self.write(f"gone-{self.rank}", {})
            if self.has_all("gone"):
                shutil.rmtree(self.path, ignore_errors=True)
        except FileNotFoundError:
            pass  # somebody else removed the folder


class Session:
    """What the operations of one rank have in common."""

    def __init__(self, folder):
        self.folder, self.size, self.rank = folder, folder.size, folder.rank
        self.over = False  # aborted: operations complete without result
        self.status = 0
        self.connected = set()  # peers for messages, and None for collectives
        self.issued = 0  # collective operations so far
        self.sent = [0] * self.size
        self.received = [0] * self.size
        self.complete = set()  # collective operations that are, beyond the first `prefix`
        self.prefix = 0
        self.written = []  # files of collective operations that some rank may still have to read

    def error(self):
        """The error of the communicator, which is the same on all ranks."""
        if not self.status and self.folder.has("error"):
            self.status = self.folder.read("error")[0]["status"]
        return self.status

    def refuse(self, message):
        """Make the operations of all ranks fail because two do not match."""
        print(f"stand-in for NCCL: rank {self.rank}: {message}", file=sys.stderr)
        self.status = INVALID_USAGE
        self.folder.write("error", {"status": INVALID_USAGE})

    def completed(self, number, prefixes):
        """Note that a collective operation is, and remove files that every rank has read."""
        self.complete.add(number)
        while self.prefix in self.complete:
            self.complete.discard(self.prefix)
            self.prefix += 1
        for old, name in list(self.written):
            if old < min(prefixes):
                self.folder.remove(name)
                self.written.remove((old, name))


class Buffer:
    """A place in device memory, kept until the operation is over."""

    def __init__(self, address, nbytes):
        owner = memory.find(address)
        self.valid = owner is not None and address + nbytes <= owner.ptr + owner.size
        self._keep = owner.buffer if self.valid else None
        self.address, self.nbytes = address, nbytes

    def read(self):
        """What is there now."""
        return ctypes.string_at(self.address, self.nbytes)

    def write(self, data):
        """Put `data` there."""
        ctypes.memmove(self.address, data, len(data))


class Operation:
    """One rank's part in an operation: `step` does what can be done and says whether that was all."""

    def __init__(self, session, header):
        self.session, self.header = session, header
        self.published = self.over = False

    def step(self):
        """Publish this rank's part, once, and finish when the others' parts are there."""
        if self.over or self.session.over:
            return True
        if self.session.error():
            return False
        if not self.published:
            self.published = True
            self.publish()
        self.over = self.finish()
        return self.over

    def differs(self, other, rank):
        """Whether another rank's header does not match; if so, that is said."""
        mine = {name: value for name, value in self.header.items() if name != "prefix"}
        theirs = {name: value for name, value in other.items() if name != "prefix"}
        if mine != theirs:
            self.session.refuse(f"{mine} here does not match {theirs} of rank {rank}")
        return mine != theirs


class Collective(Operation):
    """An operation in which all ranks take part."""

    def __init__(self, session, header, dtype, send, receive):
        super().__init__(session, header)
        self.number, session.issued = session.issued, session.issued + 1
        self.dtype, self.send, self.receive = dtype, send, receive

    def publish(self):
        """Write what this rank contributes."""
        name = f"all-{self.number}-{self.session.rank}"
        payload = b"" if self.send is None else self.send.read()
        self.session.folder.write(name, {**self.header, "prefix": self.session.prefix}, payload)
        self.session.written.append((self.number, name))

    def finish(self):
        """Compute this rank's result from what all have written."""
        session = self.session
        if not session.folder.has_all(f"all-{self.number}"):
            return False
        parts = [session.folder.read(f"all-{self.number}-{rank}") for rank in range(session.size)]
        if any(self.differs(header, rank) for rank, (header, _) in enumerate(parts)):
            return False
        if self.receive is not None:
            self.receive.write(self.result([payload for _, payload in parts]))
        session.completed(self.number, [header["prefix"] for header, _ in parts])
        return True

    def result(self, payloads):
        """What this rank receives."""
        kind = self.header["kind"]
        if kind == "allGather":
            return b"".join(payloads)
        if kind == "broadcast":
            return payloads[self.header["root"]]
        arrays = [np.frombuffer(payload, self.dtype) for payload in payloads]
        total = reduce_all(arrays, self.header["op"])
        if kind == "reduceScatter":
            total = np.split(total, self.session.size)[self.session.rank]
        return total.tobytes()


class Send(Operation):
    """One rank's half of a transfer, which is complete when the other has taken it."""

    def __init__(self, session, header, buffer, peer):
        super().__init__(session, header)
        self.buffer, self.peer = buffer, peer
        self.name = f"{session.rank}-{peer}-{session.sent[peer]}"
        session.sent[peer] += 1

    def publish(self):
        """Offer the data."""
        self.session.folder.write(f"data-{self.name}", self.header, self.buffer.read())

    def finish(self):
        """Wait for the receiver to come."""
        folder = self.session.folder
        if not folder.has(f"ready-{self.name}"):
            return False
        if self.differs(folder.read(f"ready-{self.name}")[0], self.peer):
            return False
        folder.remove(f"ready-{self.name}")
        return True


class Receive(Operation):
    """The other half."""

    def __init__(self, session, header, buffer, peer):
        super().__init__(session, header)
        self.buffer, self.peer = buffer, peer
        self.name = f"{peer}-{session.rank}-{session.received[peer]}"
        session.received[peer] += 1

    def publish(self):
        """Say that the receiver is here."""
        self.session.folder.write(f"ready-{self.name}", self.header)

    def finish(self):
        """Take the data when it is there."""
        folder = self.session.folder
        if not folder.has(f"data-{self.name}"):
            return False
        header, data = folder.read(f"data-{self.name}")
        if self.differs(header, self.peer):
            return False
        self.buffer.write(data)
        folder.remove(f"data-{self.name}")
        return True
