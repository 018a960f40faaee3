"""Attention backends against dense attention, row by row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inferd.engine.attention.base import AttentionBackend, BatchGeometry
from inferd.engine.attention.context import ForwardContext, current, forward_context
from inferd.engine.attention.select import choose
from inferd.engine.attention.torch import TorchBackend
from inferd.engine.core.kv.spec import KVSpec, SlidingWindowSpec
from inferd.engine.errors import ConfigError
from inferd.kernels.common.ops import KernelUnavailable
from inferd.kernels.select import build_ops, torch_ops

CPU = torch.device("cpu")
Served = tuple[TorchBackend, torch.dtype]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=["float32 torch", "bfloat16 torch", "bfloat16 native"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchBackend, torch.dtype]:
    """A backend that shares every prefix, however short, and the dtype it serves."""
    dtype_name, choice = request.param.split()
    dtype = getattr(torch, dtype_name)
    try:
        ops = build_ops(CPU, dtype, choice, cache_dir=tmp_path_factory.getbasetemp() / "kernels")
    except KernelUnavailable as unavailable:
        pytest.skip(str(unavailable))
    return TorchBackend(ops, min_saved_tokens=0), dtype


@dataclass
class Step:
    """A batch and its answer."""

    geometry: BatchGeometry
    q: Tensor
    kv_cache: Tensor
    expected: Tensor


def make_step(
    rows: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (8, 2),
    head_size: int = 16,
    block_size: int = 4,
    window: int | None = None,
    shared: list[tuple[int, list[int]]] | None = None,
    seed: int = 0,
) -> Step:
    """`rows`: (context, query) lengths. Blocks are permuted; whatever no row may see is NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    seq_lens = [context + query for context, query in rows]
    widths = [-(-length // block_size) for length in seq_lens]
    order = (torch.randperm(sum(widths) + 6, generator=generator) + 1).tolist()
    tables = torch.randint(0, len(order), (len(rows), max(widths) + 1), dtype=torch.int32, generator=generator)
    for row, width in enumerate(widths):
        tables[row, :width] = torch.tensor([order.pop() for _ in range(width)], dtype=torch.int32)
    for num_blocks, members in shared or []:
        tables[members, :num_blocks] = tables[members[0], :num_blocks].clone()
    kv_cache = torch.full((2, len(order) + sum(widths) + 1, block_size, num_kv_heads, head_size), torch.nan)
    q = torch.randn(sum(query for _, query in rows), num_heads + 1, head_size, generator=generator).to(dtype)
    q = q[:, :num_heads]
    expected, begin = [], 0
    for row, (context, query) in enumerate(rows):
        first = 0 if window is None else max(0, context + 1 - window)
        tokens = torch.arange(first, seq_lens[row])
        blocks, offsets = tables[row, tokens // block_size].long(), tokens % block_size
        written = ~kv_cache[0, blocks, offsets, 0, 0].isnan()  # by a row that shares them
        fresh = torch.randn(2, len(tokens), num_kv_heads, head_size, generator=generator).to(dtype).float()
        kv_cache[:, blocks, offsets] = torch.where(written[:, None, None], kv_cache[:, blocks, offsets], fresh)
        own = tables[row, : widths[row]].long()
        keys, values = kv_cache[:, own].flatten(1, 2)[:, : seq_lens[row]].nan_to_num()
        expected.append(dense(q[begin : begin + query].float(), keys, values, window))
        begin += query
    positions = torch.cat([torch.arange(context, context + query) for context, query in rows])
    geometry = BatchGeometry(
        query_lens=[query for _, query in rows],
        seq_lens=seq_lens,
        block_tables=tables,
        slots=torch.zeros_like(positions),
        positions=positions,
        shared_prefixes=shared or [],
    )
    return Step(geometry, q, kv_cache.to(dtype), torch.cat(expected))


def dense(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """q[n, hq, d] are the last n of the tokens keys[L, hk, d], values[L, hk, d] -> [n, hq, d]."""
    group = q.shape[1] // keys.shape[1]
    positions = torch.arange(len(keys) - len(q), len(keys))[:, None]
    tokens = torch.arange(len(keys))
    visible = tokens <= positions
    if window is not None:
        visible &= tokens > positions - window
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    out = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=visible)
    return out.transpose(0, 1)


def check(backend: AttentionBackend, step: Step, window: int | None = None) -> None:
    scale = step.q.shape[-1] ** -0.5
    actual = backend.attend(step.q, step.kv_cache, backend.build(step.geometry), scale, window)
    assert actual.is_contiguous()
    assert actual.dtype == step.q.dtype
    tolerance = TOLERANCE[step.q.dtype]
    torch.testing.assert_close(actual.float(), step.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("heads", "head_size"), [((4, 4), 80), ((9, 3), 64), ((8, 2), 20), ((8, 1), 128)])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 1), (5, 1), (40, 1), (15, 1)],
        [(0, 9)],
        [(13, 9), (0, 30), (3, 2)],
        [(7, 1), (60, 1), (0, 17), (21, 6)],
        [(21, 6), (7, 1), (0, 17), (60, 1)],
    ],
    ids=["one", "decode", "prompt", "chunks", "mixed", "mixed, unordered"],
)
def test_ragged_batches(
    served: Served, rows: list[tuple[int, int]], heads: tuple[int, int], head_size: int, window: int | None
) -> None:
    backend, dtype = served
    check(backend, make_step(rows, dtype=dtype, heads=heads, head_size=head_size, window=window), window)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(served: Served, seed: int) -> None:
    backend, dtype = served
    draw = random.Random(seed)
    rows = [(draw.choice([0, draw.randrange(80)]), draw.choice([1, 1, draw.randint(1, 20)])) for _ in range(7)]
    window = draw.choice([None, None, draw.randint(1, 30)])
    step = make_step(
        rows,
        dtype=dtype,
        heads=draw.choice([(3, 3), (8, 2), (9, 3), (8, 1)]),
        head_size=draw.choice([16, 20, 32, 64, 96]),
        block_size=draw.choice([1, 4, 16]),
        window=window,
        seed=seed,
    )
    check(backend, step, window)


@pytest.mark.parametrize(
    ("rows", "shared"),
    [
        ([(12, 1), (14, 1), (30, 1)], [(3, [0, 1, 2])]),
        ([(12, 1), (14, 1), (30, 1), (5, 1)], [(3, [0, 2])]),
        ([(12, 1), (9, 1), (30, 1), (8, 1)], [(3, [0, 2]), (2, [1, 3])]),
        ([(12, 5), (12, 9), (12, 1)], [(3, [0, 1, 2])]),
        ([(12, 1), (5, 1), (12, 9), (16, 3), (0, 6)], [(3, [0, 2, 3])]),
    ],
    ids=["all rows", "some rows", "two prefixes", "prompts", "mixed"],
)
@pytest.mark.parametrize(
    ("heads", "head_size"), [((8, 2), 16), ((4, 4), 20), ((9, 3), 64), ((8, 1), 80), ((4, 1), 128)]
)
def test_shared_prefixes(
    served: Served,
    rows: list[tuple[int, int]],
    shared: list[tuple[int, list[int]]],
    heads: tuple[int, int],
    head_size: int,
) -> None:
    backend, dtype = served
    check(backend, make_step(rows, dtype=dtype, shared=shared, heads=heads, head_size=head_size))


def test_a_window_reads_shared_blocks_row_by_row(served: Served) -> None:
    backend, dtype = served
    check(backend, make_step([(12, 1), (14, 1)], dtype=dtype, shared=[(3, [0, 1])], window=6), 6)


def test_a_short_shared_prefix_is_not_worth_a_call() -> None:
    calls = []
    ops = torch_ops("test")
    backend = TorchBackend(replace_prefix(ops, calls), min_saved_tokens=24)
    check(backend, make_step([(12, 1), (14, 1)], shared=[(3, [0, 1])]))
    assert calls == []
    check(backend, make_step([(12, 1), (14, 1), (13, 1)], shared=[(3, [0, 1, 2])]))
    assert calls == [3]


def replace_prefix(ops: Any, calls: list[int]) -> Any:
    def prefix_attend(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(q))
        return ops.prefix_attend(q, *rest)

    return replace(ops, prefix_attend=prefix_attend)


def test_queries_inside_of_a_shared_prefix_are_refused() -> None:
    step = make_step([(12, 1), (8, 5)], shared=[(3, [0, 1])])
    with pytest.raises(ValueError, match="row 1 shares 3 blocks"):
        check(TorchBackend(torch_ops("test"), min_saved_tokens=0), step)


class Refusing(TorchBackend):
    def supports(
        self, spec: KVSpec, device: torch.device, window: int | None, softcap: float | None = None
    ) -> str | None:
        return None if window is None else f"no window of {window}"


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A list whose first entry refuses windows."""
    monkeypatch.setattr("inferd.engine.attention.select._BACKENDS", {"picky": Refusing, "torch": TorchBackend})
    return None


SPEC = KVSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
WINDOWED = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32", window=5)


@pytest.mark.usefixtures("backends")
def test_the_first_backend_that_serves_every_layer_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "inferd.engine.attention.select")
    assert isinstance(choose("auto", torch_ops("test"), [SPEC], CPU), Refusing)
    chosen = choose("auto", torch_ops("test"), [SPEC, WINDOWED], CPU)
    assert not isinstance(chosen, Refusing)
    assert "no window of 5" in caplog.text


def test_that_there_is_no_card_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "inferd.engine.attention.select")
    assert isinstance(choose("auto", torch_ops("test"), [SPEC], CPU), TorchBackend)
    levels = {record.levelname for record in caplog.records if "TRITON_ATTN cannot serve" in record.getMessage()}
    assert levels == {"DEBUG"}
    caplog.clear()
    with pytest.raises(ConfigError, match="not on cpu"):
        choose("TRITON_ATTN", torch_ops("test"), [SPEC], CPU)
    assert caplog.records[0].levelname == "INFO"


@pytest.mark.usefixtures("backends")
def test_an_explicit_backend_that_cannot_serve_is_an_error_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="picky: no window of 5"):
        choose("picky", torch_ops("test"), [WINDOWED], CPU)
    with pytest.raises(ConfigError, match=r"'flash' is unknown.*auto, picky, torch"):
        choose("flash", torch_ops("test"), [SPEC], CPU)


def test_kv_cache_shape_fits_the_spec() -> None:
    shape = TorchBackend(torch_ops("test")).kv_cache_shape(3, SPEC)
    assert torch.Size(shape).numel() * 4 == 3 * SPEC.page_bytes


def test_forward_context_is_there_inside_and_gone_after() -> None:
    cache, slots = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    context = ForwardContext(TorchBackend(torch_ops("test")), {0: "metadata"}, {0: slots}, {"a": cache}, {"a": 0})
    with pytest.raises(RuntimeError, match="outside of forward_context"):
        current()
    with forward_context(context):
        assert current().layer("a") == (cache, slots, "metadata")
        with pytest.raises(RuntimeError, match="already active"), forward_context(context):
            pass
        assert current() is context
    with pytest.raises(ZeroDivisionError), forward_context(context):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="outside of forward_context"):
        current()
