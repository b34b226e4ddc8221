"""Bytes bent without knowing what they mean."""

from __future__ import annotations

from random import Random

_TOKENS = (
    b"\x00",
    b"\xff" * 8,
    b"\x80" * 9 + b"\x01",  # a varint of ten bytes
    b"\xff\xff\xff\xff\x07",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"../../",
    b"\xc3\x28",  # not UTF-8
    b"nan",
    b"-1",
    b"1e999",
)


def damaged(data: bytes, chance: Random) -> bytes:
    """One to four small wounds: flipped bits, cuts, repeats, insertions, zeroed runs, wrong tokens."""
    content = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not content:
            break
        at = chance.randrange(len(content))
        length = min(len(content) - at, chance.choice((1, 2, 4, 8, 64, 512)))
        match chance.randrange(8):
            case 0 | 1:
                content[at] ^= 1 << chance.randrange(8)
            case 2:
                content[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 3:
                del content[at:]
            case 4:
                del content[at : at + length]
            case 5:
                content[at:at] = content[at : at + length] * chance.choice((1, 2, 50))
            case 6:
                content[at : at + length] = bytes(length)
            case _:
                content[at:at] = chance.choice(_TOKENS)
    return bytes(content)
