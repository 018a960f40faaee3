"""TRITON_ATTN against the plain backend, eager and as a captured launch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.attention.base import BatchGeometry, StaticGeometry, StaticPrefixes
from inferd.engine.attention.torch import TorchBackend
from inferd.engine.attention.triton import TritonBackend
from inferd.kernels.common.ops import Ops
from inferd.kernels.cuda.device import interpreted

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def geometry_of(batch: Any, shared: list[tuple[int, list[int]]] | None = None) -> BatchGeometry:
    query_lens = batch.query_starts.diff().tolist()
    tokens = torch.zeros(sum(query_lens), dtype=torch.int64, device=batch.q.device)
    return BatchGeometry(query_lens, batch.seq_lens.tolist(), batch.block_tables, tokens, tokens, shared or [])


def check(twin: Ops, batch: Any, window: int | None = None, shared: list[tuple[int, list[int]]] | None = None) -> None:
    q, kv_cache = batch.wide()
    plain, own = TorchBackend(twin), TritonBackend(twin, min_saved_tokens=0)
    # Out of its rows, the plain backend reads block 0 at most.
    tables = batch.block_tables.where(batch.block_tables < kv_cache.shape[1], 0)
    geometry = geometry_of(batch)
    expected = plain.attend(
        q, kv_cache, plain.build(BatchGeometry(**{**vars(geometry), "block_tables": tables})), batch.scale, window
    )
    actual = own.attend(batch.q, batch.kv_cache, own.build(geometry_of(batch, shared)), batch.scale, window)
    assert actual.is_contiguous()
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(twin: Ops, dtype: torch.dtype, paged_batch: Callable[..., Any], seed: int) -> None:
    draw = random.Random(seed)
    query_lens = [1] * draw.randint(0, 5) + [draw.choice([2, draw.randint(2, 150)]) for _ in range(draw.randint(1, 4))]
    seq_lens = [length + draw.choice([0, draw.randrange(400)]) for length in query_lens]
    window = draw.choice([None, None, draw.randint(1, 90)])
    batch = paged_batch(
        seq_lens,
        query_lens,
        heads=draw.choice([(3, 3), (8, 2), (9, 3), (8, 1)]),
        head_size=draw.choice([64, 96, 128]),
        block_size=draw.choice([16, 64, 128]),
        dtype=dtype,
        keep=window,
    )
    check(twin, batch, window)


def test_rows_in_any_order(twin: Ops, dtype: torch.dtype, paged_batch: Callable[..., Any]) -> None:
    check(twin, paged_batch([40, 8, 17, 61, 200], [6, 1, 17, 1, 90], dtype=dtype))


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (4, 4)])
def test_shared_prefixes(
    twin: Ops, dtype: torch.dtype, paged_batch: Callable[..., Any], heads: tuple[int, int], block_size: int
) -> None:
    lens = [2 * block_size + extra for extra in (1, 20, 300, 7, 44)]
    batch = paged_batch(lens, heads=heads, block_size=block_size, dtype=dtype, shared_blocks=2)
    check(twin, batch, shared=[(2, [0, 1, 2, 3, 4])])
    check(twin, batch, shared=[(2, [0, 4]), (1, [1, 3])])


def test_a_prefix_shared_with_prompts(twin: Ops, dtype: torch.dtype, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([140, 200, 129, 400], [1, 1, 1, 250], block_size=128, dtype=dtype, shared_blocks=1)
    check(twin, batch, shared=[(1, [0, 2, 3])])


def test_queries_inside_of_a_shared_prefix_are_refused(twin: Ops, paged_batch: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="row 1 shares 32 tokens"):
        check(twin, paged_batch([40, 32], shared_blocks=2), shared=[(2, [0, 1])])


class Static:
    """Persistent tensors of eight rows, and the attention over them, captured where there is a card."""

    def __init__(self, batch: Any, twin: Ops, max_seq_len: int, *, share: bool) -> None:
        device = batch.q.device

        def whole(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.prefixes = StaticPrefixes(whole(3), whole(4), whole(8), whole(8, fill=-1), 256) if share else None
        self.geometry = StaticGeometry(
            block_tables=whole(8, batch.block_tables.shape[1]),
            seq_lens=whole(8),
            slots=whole(8, fill=-1, dtype=torch.int64),
            positions=whole(8, dtype=torch.int64),
            max_seq_len=max_seq_len,
            prefixes=self.prefixes,
        )
        self.q = torch.full((8, *batch.q.shape[1:]), torch.nan, dtype=batch.q.dtype, device=device)
        self._backend = TritonBackend(twin)
        self._metadata = self._backend.graph_metadata(self.geometry)
        self._arguments = (batch.kv_cache, self._metadata, batch.scale)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out = self._backend.attend(self.q, *self._arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = self._backend.attend(self.q, *self._arguments)

    def run(self) -> Tensor:
        if self._graph is None:
            return self._backend.attend(self.q, *self._arguments)
        self._graph.replay()
        return self._out


@pytest.mark.parametrize("share", [False, True])
def test_a_captured_launch_serves_any_lengths(
    twin: Ops, dtype: torch.dtype, paged_batch: Callable[..., Any], share: bool
) -> None:
    batch = paged_batch([300, 129, 2000, 257, 280], block_size=128, dtype=dtype, shared_blocks=1)
    static = Static(batch, twin, 4096, share=share)
    q, kv_cache = batch.wide()
    lens = batch.seq_lens.tolist()
    fill = static.geometry
    for rows, groups in (([0, 1, 2, 3, 4], [[0, 2, 4]]), ([2], []), ([4, 3, 1, 0], [[1, 2], [0, 3]]), ([], [])):
        fill.block_tables.zero_()
        fill.seq_lens.zero_()
        fill.block_tables[: len(rows)] = batch.block_tables[rows]
        fill.seq_lens[: len(rows)] = batch.seq_lens[rows]
        static.q.fill_(torch.nan)
        static.q[: len(rows)] = batch.q[rows]
        if static.prefixes is not None:
            fill_prefixes(static.prefixes, groups)
        out = static.run()
        tables = batch.block_tables[rows].where(batch.block_tables[rows] < kv_cache.shape[1], 0)
        if rows:
            expected, _ = twin.paged_decode(q[rows], kv_cache, tables, batch.seq_lens[rows], batch.scale, None)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(out[: len(rows)].float(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(out[len(rows) :], torch.zeros_like(out[len(rows) :]))
    assert max(lens) <= fill.max_seq_len


def fill_prefixes(prefixes: StaticPrefixes, groups: list[list[int]]) -> None:
    """Each group shares its first block of 128 tokens."""
    prefixes.lens.zero_()
    prefixes.row_group.fill_(-1)
    flat = [row for group in groups for row in group]
    ends = torch.tensor([len(group) for group in groups], dtype=torch.int32).cumsum(0).tolist()
    for index, group in enumerate(groups):
        prefixes.lens[index] = 128
        prefixes.row_group[group] = index
    prefixes.starts.fill_(len(flat))
    prefixes.starts[0] = 0
    for index, end in enumerate(ends):
        prefixes.starts[index + 1] = end
    prefixes.rows[: len(flat)] = torch.tensor(flat, dtype=torch.int32)


@pytest.mark.skipif(interpreted(), reason="the interpreter is no card")
def test_supports_names_its_reasons(twin: Ops, device: torch.device) -> None:
    from inferd.engine.core.kv.spec import KVSpec

    backend = TritonBackend(twin)
    assert backend.supports(KVSpec(128, 8, 128, "bfloat16"), device, None) is None
    assert "not on cpu" in str(backend.supports(KVSpec(128, 8, 128, "bfloat16"), torch.device("cpu"), None))
    assert "block_size=8" in str(backend.supports(KVSpec(8, 8, 128, "bfloat16"), device, None))
    assert "head_size=512" in str(backend.supports(KVSpec(128, 8, 512, "bfloat16"), device, None))
