"""Text that is not UTF-8: refuse it with a command that converts it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from elasticrec.config.fields import show
from elasticrec.data.units import is_compressed
from elasticrec.errors import SampleError

# Share of the lines that must be UTF-8; the rest may be bad records.
_MIN_UTF8 = 0.98
# Control characters that text may contain, such as delimiters.
_CONTROLS = "\t\r\x01\x02\x03"
# Range of the share of zero bytes in UTF-16 text; in mostly Latin text half of the bytes are zero.
_UTF16_ZERO_SHARE = (0.3, 0.6)


def refuse_other_text(path: Path, lines: Sequence[bytes]) -> None:
    """Refuse text in an encoding other than UTF-8; `lines` are some lines of a file, beginning with the first."""
    name = _utf32_of(lines[0]) or _utf16_of(b"\n".join(lines[:20]))
    if name is not None:
        raise SampleError(f"{path}: expected UTF-8 text, got {name[:6]}; {_remedy(path, name)}")
    other = [line for line in lines if not is_utf8(line)]
    if not is_utf8(lines[0]) or len(other) > (1 - _MIN_UTF8) * len(lines):
        if any(byte < 32 and byte not in _CONTROLS.encode() for line in other for byte in line):
            # Binary data, not text in another encoding.
            return
        shown = show(other[0].decode("utf-8", "backslashreplace"))
        raise SampleError(
            f"{path}: expected UTF-8 text, got {shown}; {_remedy(path, 'ENCODING')}, "
            "with ENCODING such as ISO-8859-1 or GBK"
        )


def non_utf8_note(lines: Sequence[bytes]) -> list[str]:
    """Return a note about a few lines that are not UTF-8, if there are any."""
    other = [line for line in lines if not is_utf8(line)]
    if not other:
        return []
    shown = show(other[0].decode("utf-8", "backslashreplace"))
    return [
        f"{len(other):,} of {len(lines):,} lines are not UTF-8, such as {shown}: "
        "their values do not match the values in requests, which are UTF-8"
    ]


def is_utf8(line: bytes) -> bool:
    """Return whether a line is valid UTF-8."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _utf32_of(line: bytes) -> str | None:
    """Return the name of the UTF-32 variant of the first line of a file, or None."""
    if line.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    for name in ("UTF-32LE", "UTF-32BE"):
        try:
            text = line[: len(line) // 4 * 4].decode(name)
        except UnicodeDecodeError:
            continue
        # UTF-16 and binary numbers may decode as UTF-32, but give characters that text does not contain.
        if text and all(c in _CONTROLS or (c.isprintable() and c < "\U00010000") for c in text):
            return name
    return None


def _utf16_of(start: bytes) -> str | None:
    """Return the name of the UTF-16 variant of a text, or None."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    least, most = _UTF16_ZERO_SHARE
    if not least <= start.count(0) / max(len(start), 1) <= most:
        return None
    return "UTF-16BE" if start.startswith(b"\0") else "UTF-16LE"


def _remedy(path: Path, encoding: str) -> str:
    if is_compressed(path):
        return f"write it as UTF-8 (`iconv -f {encoding} -t UTF-8`)"
    return f"convert it: iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(f'{path}.utf8')}"
