"""What a call writes into (out, max_logits, lse, workspace) is memory of its own: no byte of it belongs to another
argument.

Only addresses and strides are looked at, so this serves NumPy and CuPy arrays alike and never synchronises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_WRITTEN = ("out", "max_logits", "lse", "workspace")
_MAX_WORK = 1 << 14  # candidates that NumPy tries (about 1 ms) before interleaved views count as overlapping
_MAX_KNOWN = 4096  # sets of addresses: layers times the buffers that they take turns with


class _Layout:
    """Address and strides of a CuPy array for NumPy, which does not read the memory."""

    def __init__(self, x: Any) -> None:
        self.__array_interface__ = dict(version=3, shape=x.shape, strides=x.strides, data=(x.data.ptr, False),
                                        typestr=f"|V{x.dtype.itemsize}")


def check(arrays: dict[str, Any], given: dict[str, Any] | None = None) -> None:
    """Raises ValueError, naming both, when a written array shares memory with another one.

    arrays: by argument name, None where there is none. given: as the caller passed them, for those of `arrays` that are
    NumPy copies in another type.
    """
    originals = {name: x for name, x in (given or {}).items() if isinstance(x, np.ndarray)}
    layouts = {name: x if isinstance(x, np.ndarray) else np.asarray(_Layout(x))
               for name, x in {**arrays, **originals}.items() if x is not None}
    for name in _WRITTEN:
        written = layouts.pop(name, None)
        for other, x in layouts.items() if written is not None else ():
            if np.may_share_memory(written, x, max_work=_MAX_WORK):  # True also for what takes more work to decide
                raise ValueError(f"{name}: got memory that overlaps {other}, expected memory of its own")


class Watch:
    """The same for the calls of one plan, whose arrays differ in their addresses alone: each set is looked at once."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self.known = tuple(names), set()

    def look(self, addresses: tuple[int, ...], arrays: dict[str, Any]) -> None:
        """For `addresses` (of all the arrays, 0 for None) that are not among the known."""
        check({name: arrays[name] for name in self._names})
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known.add(addresses)


def watch(arrays: dict[str, Any]) -> Watch | None:
    """For a plan that is made for such arguments; None where its calls write into new memory only."""
    return Watch(arrays) if any(arrays.get(name) is not None for name in _WRITTEN) else None
