"""Bandwidth and arithmetic rate of every kernel, against what it should reach: python tests/gpu/bench_kernels.py

Each figure is the time of one call inside a CUDA graph of many, which read weights and caches larger than the L2 in
turn; the median of several replays. Bytes are those that must move: each input read once, each output written once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from inferd.engine.attention.base import BatchGeometry, StaticGeometry
from inferd.engine.attention.triton import TritonBackend
from inferd.kernels.cuda.ops import cuda_ops

CARD = torch.device("cuda")
BF16 = torch.bfloat16
L2_BYTES = 400 << 20  # data that no cache holds

Call = Callable[[], object]


def seconds(calls: Sequence[Call], replays: int = 7) -> float:
    """Of one call, on average over `calls`, in a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(calls)


def report(name: str, time: float, num_bytes: float = 0, flops: float = 0, aim: str = "") -> None:
    rate = f"{num_bytes / time / 1e12:5.2f} TB/s" if num_bytes else f"{flops / time / 1e12:5.0f} TFLOP/s"
    print(f"{name:52} {time * 1e6:9.2f} us  {rate:14} {aim}", flush=True)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CARD, dtype=BF16)


def copies(num_bytes: int) -> int:
    """As many as no cache holds."""
    return max(4, L2_BYTES // num_bytes)


def bench_linears() -> None:
    ops = cuda_ops(BF16, CARD, strict=True)
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    aims = {"qkv": "aim 3.7", "o": "aim 3.7", "down": "aim 3.9", "gate_up": "aim 4.0"}
    for name, (out_features, in_features) in shapes.items():
        num_bytes = 2 * out_features * in_features
        weights = [randn(out_features, in_features) * in_features**-0.5 for _ in range(copies(num_bytes))]
        linears = [ops.make_linear(weight, None) for weight in weights]
        for rows in (1, 2, 8, 16):
            x = randn(rows, in_features)
            own = seconds([partial(linear, x) for linear in linears] * 2)
            blas = seconds([partial(torch.nn.functional.linear, x, weight) for weight in weights] * 2)
            aim = f"{aims[name] if rows == 1 else '':8} cuBLAS {num_bytes / blas / 1e12:.2f}"
            report(f"linear {name} {out_features}x{in_features}, {rows} rows", own, num_bytes, aim=aim)
        del weights, linears


class Paged:
    """Sequences of random keys and values in permuted pages."""

    def __init__(self, lens: Sequence[int], heads: tuple[int, int], size: int, page: int = 128) -> None:
        widths = [-(-length // page) for length in lens]
        order = (torch.randperm(sum(widths)) + 1).to(torch.int32)
        self.tables = torch.zeros(len(lens), max(widths), dtype=torch.int32)
        for row, width in enumerate(widths):
            self.tables[row, :width], order = order[:width], order[width:]
        self.tables = self.tables.to(CARD)
        self.cache = randn(2, sum(widths) + 1, page, heads[1], size)
        self.lens, self.heads, self.size = list(lens), heads, size
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=CARD)

    def bytes_of(self, tokens: int) -> int:
        return tokens * 2 * self.heads[1] * self.size * 2

    def attend(self, query_lens: Sequence[int], shared: list[tuple[int, list[int]]] | None = None) -> Call:
        backend = TritonBackend(cuda_ops(BF16, CARD, strict=True))
        tokens = torch.zeros(sum(query_lens), dtype=torch.int64, device=CARD)
        geometry = BatchGeometry(list(query_lens), self.lens, self.tables, tokens, tokens, shared or [])
        q, metadata = randn(sum(query_lens), self.heads[0], self.size), backend.build(geometry)
        return lambda: backend.attend(q, self.cache, metadata, self.size**-0.5)

    def captured(self, max_seq_len: int) -> Call:
        """One query token a row, divided as a launch that must also serve rows of `max_seq_len`."""
        backend = TritonBackend(cuda_ops(BF16, CARD, strict=True))
        rows = torch.zeros(len(self.lens), dtype=torch.int64, device=CARD)
        q = randn(len(self.lens), self.heads[0], self.size)
        metadata = backend.graph_metadata(StaticGeometry(self.tables, self.seq_lens, rows, rows, max_seq_len))
        return lambda: backend.attend(q, self.cache, metadata, self.size**-0.5)


def bench_decode() -> None:
    cases = [
        ("32 x 4096, heads 32/8, d 128", [4096] * 32, (32, 8), 128, 128, "aim 3.6"),
        ("32 x 4096, heads 32/8, d 128, page 16", [4096] * 32, (32, 8), 128, 16, ""),
        ("1 x 65536, heads 32/8, d 128", [65536], (32, 8), 128, 128, ""),
        ("4 x 32768, heads 32/8, d 128", [32768] * 4, (32, 8), 128, 128, ""),
        ("32 x 8192, heads 32/8, d 128", [8192] * 32, (32, 8), 128, 128, ""),
        ("256 x 640, heads 32/8, d 128", [640] * 256, (32, 8), 128, 128, ""),
        ("32 x 640, heads 32/8, d 128", [640] * 32, (32, 8), 128, 128, ""),
        ("8 x 640, heads 32/8, d 128", [640] * 8, (32, 8), 128, 128, ""),
        ("1 x 300, heads 32/8, d 128", [300], (32, 8), 128, 128, ""),
        ("48 x 1000 to 8000, heads 32/8, d 128", [1000 + 149 * row for row in range(48)], (32, 8), 128, 128, ""),
        ("32 x 4096, heads 9/3, d 64", [4096] * 32, (9, 3), 64, 128, ""),
        ("32 x 4096, heads 16/8, d 256", [4096] * 32, (16, 8), 256, 128, ""),
    ]
    for name, lens, heads, size, page, aim in cases:
        batch = Paged(lens, heads, size, page)
        num_bytes = batch.bytes_of(sum(lens))
        others = [Paged(lens, heads, size, page) for _ in range(min(7, L2_BYTES // num_bytes))]
        calls = [one.attend([1] * len(lens)) for one in (batch, *others)]
        report(f"decode {name}", seconds(calls * 4), num_bytes, aim=aim)
        del batch, others, calls


def bench_captured() -> None:
    for rows, length in ((1, 300), (8, 640), (32, 640)):
        batches = [Paged([length] * rows, (32, 8), 128) for _ in range(12)]
        num_bytes = batches[0].bytes_of(rows * length)
        time = seconds([batch.captured(65536) for batch in batches] * 3)
        report(f"decode {rows} x {length}, captured for 65536", time, num_bytes)


def bench_prefill() -> None:
    cases = [
        ("4 x 4096, heads 32/8, d 128", [4096] * 4, [4096] * 4, (32, 8), 128, 128, "aim 450"),
        ("4 x 4096, heads 32/8, d 128, page 16", [4096] * 4, [4096] * 4, (32, 8), 128, 16, ""),
        ("16 x 512, heads 32/8, d 128", [512] * 16, [512] * 16, (32, 8), 128, 128, ""),
        ("2048 after 30720, heads 32/8, d 128", [32768], [2048], (32, 8), 128, 128, ""),
        ("64 after 32704, heads 32/8, d 128", [32768], [64], (32, 8), 128, 128, ""),
        ("4 x 4096, heads 9/3, d 64", [4096] * 4, [4096] * 4, (9, 3), 64, 128, ""),
        ("4 x 4096, heads 16/8, d 256", [4096] * 4, [4096] * 4, (16, 8), 256, 128, ""),
    ]
    for name, lens, query_lens, heads, size, page, aim in cases:
        batch = Paged(lens, heads, size, page)
        pairs = sum(
            query * (length - query) + query * query / 2 for length, query in zip(lens, query_lens, strict=True)
        )
        report(f"prefill {name}", seconds([batch.attend(query_lens)] * 5), flops=4 * pairs * heads[0] * size, aim=aim)
        del batch


def bench_prefix() -> None:
    batch = Paged([4096 + 64] * 64, (32, 8), 128)
    batch.tables[:, :32] = batch.tables[0, :32]
    read = batch.bytes_of(4096 + 64 * 64)
    shared = seconds([batch.attend([1] * 64, [(32, list(range(64)))])] * 8)
    report("decode 64 x (4096 shared + 64)", shared, read, aim="floor 9 us of arithmetic + 8 us of reading")
    report("  the same, each row for itself", seconds([batch.attend([1] * 64)] * 8), batch.bytes_of(64 * 4160))


def bench_pointwise() -> None:
    ops = cuda_ops(BF16, CARD, strict=True)
    weight, cos_sin, cache = randn(4096), torch.rand(8192, 128, device=CARD), randn(2, 65, 128, 8, 128)
    for rows in (1, 32, 256, 8192):
        x, residual, gate_up = randn(rows, 4096), randn(rows, 4096), randn(rows, 28672)
        qkv = randn(rows, 48, 128)
        slots = torch.arange(rows, device=CARD)
        q, k, v = qkv.split((32, 8, 8), dim=1)
        moved = 4 * (q.numel() + 1.5 * k.numel() + 0.5 * v.numel())
        calls: list[tuple[str, float, Call]] = [
            (f"rms_norm {rows} x 4096", 4 * x.numel(), partial(ops.rms_norm, x, weight, 1e-5)),
            (f"add_rms_norm {rows} x 4096", 8 * x.numel(), partial(ops.add_rms_norm, x, residual, weight, 1e-5)),
            (f"silu_mul {rows} x 14336", 3 * gate_up.numel(), partial(ops.silu_mul, gate_up)),
            (f"rope_store {rows} x 32/8 x 128", moved, partial(ops.rope_store, q, k, v, slots, cos_sin, cache, slots)),
        ]
        for name, num_bytes, call in calls:
            report(name, seconds([call] * (40 if rows < 1000 else 6)), num_bytes)


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for bench in (bench_linears, bench_decode, bench_captured, bench_prefill, bench_prefix, bench_pointwise):
        bench()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
