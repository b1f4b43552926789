"""The tile scheduler's plan: every block once, in order, balanced, and equal to the greedy rule told as a story."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmla_cupy.reference.sched_meta import cuts_nothing, plan

BLOCK, OVERHEAD = 64, 4
INT_MAX = 2**31 - 1

lengths_of_requests = st.one_of(
    st.lists(st.integers(-3, 400), min_size=1, max_size=200),
    st.lists(st.sampled_from([-1, 0, 1, 63, 64, 65, 4096, 131072, INT_MAX]), min_size=1, max_size=60),
    st.builds(lambda n, length: [length] * n, st.integers(1, 300), st.integers(0, 20000)),
    st.builds(
        lambda n, high, seed: np.random.default_rng(seed).integers(0, high + 1, n).tolist(),
        st.integers(1, 5000), st.sampled_from([1, 100, 5000, INT_MAX - 1]), st.integers(0, 2**32),
    ),
)  # fmt: skip
parts_of_a_gpu = st.integers(1, 264)


def blocks_of(lengths, block_size=BLOCK):
    return [-(-max(0, int(length)) // block_size) for length in lengths]


def payload_of(blocks, num_parts, overhead):
    """What a part may spend."""
    stride = -(-(sum(blocks) + overhead * len(blocks)) // num_parts)
    if len(set(blocks)) == 1:  # equal requests stay whole where that makes parts longer by 16 blocks and a 16th at most
        whole = -(-len(blocks) // num_parts) * (blocks[0] + overhead)
        if whole <= stride + 16 and 16 * whole <= 17 * stride:
            stride = max(stride, whole)
    return stride + overhead


def check(lengths, metadata, num_splits, block_size=BLOCK, overhead=OVERHEAD):
    """Everything the kernels rely on."""
    blocks, batch, num_parts = blocks_of(lengths, block_size), len(lengths), len(metadata)
    assert metadata.dtype == num_splits.dtype == np.int32
    assert metadata.shape == (num_parts, 8) and num_splits.shape == (batch + 1,)
    payload = payload_of(blocks, num_parts, overhead)

    fragments, owners, ended = [0] * batch, [[] for _ in range(batch)], False
    expected_request, expected_block = 0, 0  # where the next part has to begin
    for part, row in enumerate(metadata.tolist()):
        begin_req, begin_block, end_req, end_block, begin_split, _, _, reserved = row
        assert reserved == 0
        if begin_req == batch:
            assert row == [batch, 0, batch, 0, 0, 0, 0, 0]
            ended = True
            continue
        assert not ended and (begin_req, begin_block) == (expected_request, expected_block)
        assert begin_split == fragments[begin_req]
        cost = 0
        for request in range(begin_req, end_req + 1):
            first = begin_block if request == begin_req else 0
            last = end_block if request == end_req else blocks[request]
            assert first < last <= blocks[request] or first == last == blocks[request] == 0
            cost += last - first + overhead
            fragments[request] += 1
            owners[request].append(part)
        assert cost <= payload
        whole = end_block == blocks[end_req]
        expected_request, expected_block = (end_req + 1, 0) if whole else (end_req, end_block)
    assert (expected_request, expected_block) == (batch, 0)

    for row in metadata.tolist():
        if row[0] < batch:
            assert row[5] == (len(owners[row[0]]) > 1) and row[6] == (len(owners[row[2]]) > 1)
    assert all(parts == list(range(parts[0], parts[-1] + 1)) for parts in owners)  # slots of partial results need this
    assert all(fragments[i] == 1 for i in range(batch) if blocks[i] == 0)
    assert num_splits.tolist() == np.cumsum([0, *fragments]).tolist()


def greedy(lengths, num_parts, overhead=OVERHEAD):
    """The rule as a story: a part takes whole requests while it can afford them, then cuts the next one."""
    blocks = blocks_of(lengths)
    payload = payload_of(blocks, num_parts, overhead)
    rows, request, block = [], 0, 0
    for _ in range(num_parts):
        begin, end, left = (request, block), None, payload
        while request < len(blocks):
            rest = blocks[request] - block
            if left >= rest + overhead:
                left -= rest + overhead
                end = (request, blocks[request])
                request, block = request + 1, 0
                continue
            if left > overhead:
                block += left - overhead
                end = (request, block)
            break
        rows.append([*begin, *end] if end else [len(blocks), 0, len(blocks), 0])
    return rows


@settings(max_examples=300, deadline=None)
@given(lengths_of_requests, parts_of_a_gpu)
def test_plan_is_complete_ordered_and_balanced(lengths, num_parts):
    metadata, num_splits = plan(np.array(lengths, np.int32), num_parts)
    check(lengths, metadata, num_splits)
    assert metadata[:, :4].tolist() == greedy(lengths, num_parts)


@settings(max_examples=100, deadline=None)
@given(lengths_of_requests, parts_of_a_gpu, st.sampled_from([1, 16, 256]), st.sampled_from([1, 2, 17, 300]))
def test_other_block_sizes_and_overheads(lengths, num_parts, block_size, overhead):
    result = plan(np.array(lengths, np.int32), num_parts, block_size=block_size, overhead_blocks=overhead)
    check(lengths, *result, block_size, overhead)


@pytest.mark.parametrize("batch", [1, 11622, 11623, 32768, 100000])
def test_no_batch_limit(batch):
    lengths = np.random.default_rng(batch).integers(0, 5000, batch).astype(np.int32)
    start = time.perf_counter()
    result = plan(lengths, 132)
    assert time.perf_counter() - start < 1.0
    check(lengths.tolist(), *result)


def test_longest_requests_do_not_overflow():
    lengths = np.full(100000, INT_MAX, np.int32)
    check(lengths.tolist(), *plan(lengths, 264))
    check([INT_MAX], *plan(np.array([INT_MAX], np.int32), 132, block_size=1), block_size=1)


def test_equal_requests_are_shared_out_evenly():
    metadata, num_splits = plan(np.full(132, 4096, np.int32), 132)
    assert metadata[:, 0].tolist() == list(range(132)) and not metadata[:, 4:].any()
    metadata, num_splits = plan(np.array([64 * 1000], np.int32), 10)
    assert num_splits.tolist() == [0, 10] and (metadata[:, 5:7] == 1).all()
    assert np.ptp(metadata[:9, 3] - metadata[:9, 1]) == 0


@pytest.mark.parametrize(("batch", "parts", "blocks", "whole"), [
    (128, 66, 64, True), (128, 66, 128, True), (128, 66, 256, True), (128, 66, 512, False), (128, 33, 256, False),
    (64, 66, 8, True), (100, 66, 128, False), (70, 66, 4, False)])
def test_equal_requests_stay_whole_where_that_costs_little(batch, parts, blocks, whole):
    metadata, num_splits = plan(np.full(batch, 64 * blocks, np.int32), parts)
    assert (num_splits[-1] == batch) == whole
    check([64 * blocks] * batch, metadata, num_splits)


def test_cuts_nothing_tells_of_equal_requests_what_their_plan_does():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        batch, parts, blocks = (int(2 ** rng.uniform(0, most)) for most in (9, 8, 9))
        overhead = int(rng.choice((1, 2, 4)))
        metadata, num_splits = plan(np.full(batch, 64 * blocks), parts, overhead_blocks=overhead)
        whole = num_splits[-1] == batch
        assert cuts_nothing(batch, parts, blocks, overhead) == whole, (batch, parts, blocks, overhead)
        if whole:
            begin, end = (np.minimum(-(-batch // parts) * np.arange(parts + 1), batch)[which] for which in
                          (slice(None, -1), slice(1, None)))
            assert (metadata[:, 0] == begin).all()
            assert (metadata[:, 2] == np.where(begin < batch, end - 1, batch)).all()


def test_one_longer_request_and_requests_are_cut():
    assert plan(np.full(128, 8192, np.int32), 66)[1][-1] == 128
    assert plan(np.array([8192] * 127 + [8193], np.int32), 66)[1][-1] > 128


def test_topk_replaces_the_lengths():
    lengths = np.array([5, 0, 100000], np.int32)
    for got, expected in zip(plan(lengths, 20, topk=2048), plan(np.full(3, 2048), 20), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_empty_batch_and_unsigned_lengths():
    metadata, num_splits = plan(np.zeros(0, np.int32), 4)
    assert not metadata.any() and num_splits.tolist() == [0]
    for got, expected in zip(plan(np.array([7, 300], np.uint32), 3), plan([7, 300], 3), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1], 0), {}, ValueError, "num_sm_parts: got 0, expected at least 1"),
        (([1], 1), {"block_size": 0}, ValueError, "block_size: got 0"),
        (([1], 1), {"overhead_blocks": 0}, ValueError, "overhead_blocks: got 0"),
        (([[1]], 1), {}, ValueError, "cache_seqlens: got 2 dimensions, expected 1"),
        (([1.5], 1), {}, TypeError, "cache_seqlens: got float64, expected integers"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        plan(*arguments, **options)
