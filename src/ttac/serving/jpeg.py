"""How much work a JPEG file asks for, read from its markers before it is decoded."""

from __future__ import annotations

import re

START = b"\xff\xd8\xff"
_SCAN, _END = 0xDA, 0xD9
# Within coded pixels a byte FF is followed by 00, by a restart (D0 to D7), or by a fill byte FF; all else is a marker.
_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")
_WITHOUT_LENGTH = frozenset((0x01, 0xD8))
_RESERVED = range(0x02, 0xC0)


def count_scans(content: bytes, most_segments: int) -> int:
    """Count the passes over all pixels that a JPEG file asks for, as its decoder meets them.

    Segments are stepped over by their lengths, as previews and colour profiles hold markers too. A ValueError says that
    there are more than `most_segments`, as every one of them costs time as well, or that one has a reserved marker: a
    decoder steps over that marker alone, and would meet the scans in what passes for its segment.

    >>> count_scans(START + b"\\xe0\\0\\4\\xff\\xda" + b"\\xff\\xda\\0\\2" + b"pixels\\xff\\0" + b"\\xff\\xd9", 100)
    1
    """
    scans = place = 0
    for _ in range(most_segments):
        found = _MARKER.search(content, place)
        if found is None or (marker := found[1][0]) == _END:
            return scans
        if marker in _RESERVED:
            raise ValueError(f"a reserved marker ({marker:#x})")
        scans += marker == _SCAN
        place = found.end()
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(content[place : place + 2], "big")
    raise ValueError(f"more than {most_segments} segments")
