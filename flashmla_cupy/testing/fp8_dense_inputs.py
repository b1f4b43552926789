"""Arrays of a dense decode case over an FP8 cache, built hostile: slots past the lengths, pages of nobody and all that
lies between pages are one poison byte, unused block-table entries point nowhere, outputs are pre-filled with NaN inside
guard bands. Written over the array namespace.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashmla_cupy.testing import inputs, sparse_inputs
from flashmla_cupy.testing.cases import CONTIGUOUS
from flashmla_cupy.testing.fp8_dense_cases import Fp8DenseCase


def build(case: Fp8DenseCase, xp: Any = np) -> inputs.Inputs:
    """The arrays of `case`, the same bits for every `xp`.

    k_cache is uint8 (pages, page_size, 1, bytes_per_token), contiguous: (batch, s_k, 1, bytes_per_token).
    """
    rng = np.random.default_rng(case.seed)
    lengths = np.asarray(case.lengths, np.int32)
    if case.page_size == CONTIGUOUS:
        table, valid_tokens = None, lengths
        page_size = max(case.lengths, default=0) + (case.spare_pages and 37)
    else:
        table, valid_tokens = inputs.paging(case, xp, rng)
        page_size = case.page_size
    named = np.arange(page_size) < valid_tokens[:, None]  # (pages, page_size): slots that hold a token
    cache = sparse_inputs.hostile_cache(case, xp, rng, *named.shape, named.reshape(-1), 2 * case.seed)
    q, (out, lse) = sparse_inputs.query(case, xp), sparse_inputs.outputs(case, xp)
    return inputs.Inputs(q, cache, table, xp.asarray(lengths), out, lse)
