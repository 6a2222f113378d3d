"""Mappings of shared memory: what they hold, who may write, and when they go."""

import gc
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from synkro.memory.mapping import HUGE, map_file, take_huge_pages
from synkro.memory.segment import Segment
from synkro.plan.call import Access

pytestmark = pytest.mark.quick

SIZES = [1, mmap.PAGESIZE, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 12345]


@pytest.fixture
def memfd():
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def mapped_bytes():
    """The size of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def huge_bytes(array):
    """How much of *array* lies in huge pages of shared memory (proc(5), smaps)."""
    address, total, inside = array.__array_interface__["data"][0], 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            name, *rest = line.split()
            if "-" in name and not name.endswith(":"):
                low, high = (int(part, 16) for part in name.split("-"))
                inside = low < address + array.nbytes and address < high
            elif inside and name == "ShmemPmdMapped:":
                total += int(rest[0]) << 10
    return total


def collapses():
    """Whether this kernel makes huge pages of shared memory when asked: Linux 6.1 and later."""
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", os.uname().release).groups())
    return (major, minor) >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_one_mapping_writes_another_reads_and_a_copy_keeps(memfd, nbytes):
    os.ftruncate(memfd, nbytes)
    take_huge_pages(memfd, nbytes)
    one, other, copy = (map_file(memfd, nbytes, Access[name]) for name in ("WRITE", "READ", "COPY"))
    assert len(one) == len(other) == nbytes
    copy[...] = 7
    assert copy.all()
    assert not one.any()
    one[...] = np.arange(nbytes) % 251
    assert np.array_equal(other, np.arange(nbytes) % 251)
    assert (copy == 7).all()
    assert os.fstat(memfd).st_size == nbytes


def test_a_mapping_to_read_can_by_no_means_be_written(memfd):
    os.ftruncate(memfd, HUGE)
    view = map_file(memfd, HUGE, Access.READ)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 64 * HUGE + 1])
def test_a_mapping_goes_with_its_last_view(memfd, nbytes, access):
    os.ftruncate(memfd, nbytes)
    map_file(memfd, nbytes, access)  # what is loaded with the first
    before = mapped_bytes()
    view = map_file(memfd, nbytes, access)[nbytes // 2 :].view(np.int8)
    gc.collect()
    assert mapped_bytes() - before >= nbytes - HUGE
    assert not view.any()
    del view
    gc.collect()
    assert mapped_bytes() - before < mmap.PAGESIZE * 64


def test_a_file_that_cannot_be_mapped_leaves_no_mapping(memfd):
    before = mapped_bytes()
    reader, writer = os.pipe()
    try:
        for _ in range(100):
            with pytest.raises(OSError, match="No such device"):
                map_file(reader, 8 * HUGE, Access.READ)
    finally:
        os.close(reader)
        os.close(writer)
    assert mapped_bytes() - before < 8 * HUGE


@pytest.mark.skipif(not collapses(), reason="this kernel makes no huge pages of shared memory")
def test_large_segments_lie_in_huge_pages():
    segment = Segment.create(1, 5 * HUGE + 4096)
    segment.base[...] = 1
    assert huge_bytes(segment.base) == 5 * HUGE
    attached = Segment.attach(1, os.dup(segment.fd), segment.nbytes, Access.READ)
    assert attached.base.sum() == segment.nbytes
    assert huge_bytes(attached.base) == 5 * HUGE
    segment.close()


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_all_of_a_segment_is_reserved(nbytes, huge, monkeypatch):
    if not huge:
        monkeypatch.setattr("synkro.memory.mapping._MADV_COLLAPSE", -1)  # what older kernels do not know
    segment = Segment.create(1, nbytes)
    assert os.fstat(segment.fd).st_blocks * 512 >= nbytes
    assert os.fstat(segment.fd).st_size == nbytes
    segment.base[...] = 1
    assert segment.base.sum() == nbytes
    segment.close()
