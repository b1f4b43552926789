"""Every kernel variant compiles for its architecture without spills and local memory, and fits an SM."""

from __future__ import annotations

import pytest

from flashmla_cupy.ops._select import all_specs
from flashmla_cupy.runtime.compile import compile_cubin

# What their headers state and justify.
SPILLS = {f"sparse_decode.sm90.v32.{keys}": (8, 8) for keys in ("crossover", "paged_crossover")}
REGISTERS_OF_AN_SM, SHARED_BYTES_OF_A_BLOCK = 65536, 232448


@pytest.mark.parametrize("spec", all_specs(), ids=lambda spec: spec.name)
def test_no_spills_and_it_fits(spec):
    compiled = compile_cubin(spec)
    assert (compiled.spill_bytes, compiled.local_bytes) == SPILLS.get(spec.name, (0, 0)), compiled.log
    assert compiled.registers * compiled.record.threads <= REGISTERS_OF_AN_SM
    assert compiled.record.smem_bytes <= SHARED_BYTES_OF_A_BLOCK
