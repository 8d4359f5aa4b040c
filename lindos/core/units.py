"""Numbers as people read them. Units are in the names of values everywhere else; here they become text."""

from __future__ import annotations

import re

from lindos.core.errors import InputError

_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def text_of_bytes(count_bytes: float) -> str:
    """Bytes with a binary unit: `text_of_bytes(1536) == "1.50 KiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count_bytes) < 1024:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.2f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.2f} TiB"


def bytes_of_text(text: str | int) -> int:
    """Bytes meant by "60GiB", "1.5 GB" or a plain number.

    Raises:
        InputError: the text is no size.
    """
    if isinstance(text, int) and text >= 0:
        return text
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].lower() not in _SIZES:
        raise InputError(f"a size is a number and a unit, like '60GiB' or '500MB'; got {text!r}.")
    return int(float(match[1]) * _SIZES[match[2].lower()])


def text_of_count(count: float) -> str:
    """A count with a decimal unit: `text_of_count(8_400_000) == "8.40 M"`."""
    for unit in ("", " K", " M", " G"):
        if abs(count) < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.2f}{unit}"
        count /= 1000
    return f"{count:.2f} T"
