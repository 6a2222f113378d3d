"""A switch on the way to a host that changes what passes: ``python switch.py ONE OTHER WORD NEW``.

It hands frames over from interface ONE to OTHER and back, and puts NEW in the place of each WORD in the
bytes of TCP, with a right checksum.  It prints a line when it begins, and one at the first change.
"""

import array
import fcntl
import select
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, _STSO, _SGSO
_ETH, _TCP = 14, 6


def whole(interface):
    """Have frames leave *interface* as they go over a cable: small, and with checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for command in _OFFLOADS:
            value = array.array("I", [command, 0])
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(probe, _SIOCETHTOOL, request.ljust(40, b"\0"))


def changed(frame, word, new):
    """The frame with another word in it; None if it is to go as it is."""
    if word not in frame or frame[12:14] != b"\x08\x00" or frame[23] != _TCP:
        return None
    start = _ETH + 4 * (frame[_ETH] & 15)
    end = _ETH + int.from_bytes(frame[16:18], "big")
    segment = bytearray(frame[start:end].replace(word, new))
    segment[16:18] = b"\0\0"
    addresses = frame[26:34] + struct.pack(">HH", _TCP, len(segment))
    text = addresses + segment + b"\0" * (len(segment) % 2)
    total = sum(array.array("H", text))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    segment[16:18] = (~total & 0xFFFF).to_bytes(2, sys.byteorder)
    return frame[:start] + bytes(segment) + frame[end:]


def main(one, other, word, new):
    ends = []
    for name in (one, other):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        end.bind((name, 0))
        ends.append(end)
    print("begun", flush=True)
    told = False
    while True:
        for end in select.select(ends, [], [])[0]:
            frame, address = end.recvfrom(1 << 16)
            if address[2] == socket.PACKET_OUTGOING:
                continue
            forged = changed(frame, word.encode(), new.encode())
            if forged and not told:
                told = True
                print("changed", flush=True)
            ends[end is ends[0]].send(forged or frame)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        whole(sys.argv[2])
    else:
        main(*sys.argv[1:])
