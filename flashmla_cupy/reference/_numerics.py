"""Numbers for the references: the array namespace, exact widening, and rounding that happens once."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

# significand bits (the implicit one included), exponent of the smallest normal number, largest finite number
_FORMATS = {
    "bfloat16": (8, -126, float.fromhex("0x1.fep127")),
    "float16": (11, -14, 65504.0),
    "float32": (24, -126, float.fromhex("0x1.fffffep127")),
}


def namespace_of(array: Any) -> Any:
    """The module, ``numpy`` or ``cupy``, whose functions take ``array``."""
    return sys.modules["cupy"] if type(array).__module__.partition(".")[0] == "cupy" else np


def widen(array: Any) -> Any:
    """Any float array as float64 in C order. No value changes."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        if array.dtype != np.float64:
            array = array.astype(np.float32)  # CuPy converts bfloat16 to and from float32 only
        return array.astype(np.float64, order="C", copy=False)


@np.errstate(under="ignore")
def round_to(values: Any, dtype: Any, xp: Any = None) -> Any:
    """``values`` (float64) rounded to the nearest number that ``dtype`` holds, ties to even; the result is float64.

    Rounds once. A cast from float64 to bfloat16 may go through float32 and round twice. Subnormals are kept and
    overflow gives infinity, as in a conversion by hardware.
    """
    xp = xp or namespace_of(values)
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return values
    if dtype.name not in _FORMATS:
        raise TypeError(f"dtype: got {dtype}, expected one of {', '.join(_FORMATS)}, float64")
    bits, lowest_exponent, largest = _FORMATS[dtype.name]
    _, exponent = xp.frexp(values)  # values = m * 2^exponent, 0.5 <= |m| < 1
    quantum = xp.maximum(exponent, lowest_exponent + 1) - bits
    rounded = xp.ldexp(xp.rint(xp.ldexp(values, -quantum)), quantum)
    return xp.where(abs(rounded) > largest, xp.copysign(xp.inf, values), rounded)


@np.errstate(under="ignore")
def cast(values: Any, dtype: Any, xp: Any = None) -> Any:
    """``values`` (float64) as an array of ``dtype``, rounded once; see ``round_to``."""
    return round_to(values, dtype, xp).astype(dtype)


def unit_roundoff(dtype: Any) -> float:
    """Largest relative error of one rounding to ``dtype``."""
    dtype = np.dtype(dtype)
    return 2.0**-53 if dtype == np.float64 else 2.0 ** -_FORMATS[dtype.name][0]
