"""`inferd bench --suite gpu`: the GPU table on a model of random weights."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from inferd.engine.bench.gpu_profile import profile_steps
from inferd.engine.bench.gpu_report import GpuReport
from inferd.engine.bench.gpu_suite import GPU_SUITE, GpuRow, make_dummy_model, select_rows
from inferd.engine.bench.gpu_timing import TimedEngine, measure_rows
from inferd.engine.config import EngineArgs

PROFILED_ROWS = (1, 32, 256)
LONGEST_TOKENS = 66560  # what the longest row needs, in whole pages


def run_gpu_suite(options: argparse.Namespace) -> GpuReport:
    """Raises `EngineError` when the engine cannot start, ValueError for an unknown row."""
    rows = select_rows(options.rows)
    settings = _settings(options, rows)
    with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
        args = EngineArgs(model=str(make_dummy_model(Path(folder) / "llama-3.1-8b-shapes")), **settings)
        results, ready_s, decisions = [], None, []
        if options.rounds > 0:
            engine = TimedEngine(args, in_process=options.in_process)
            try:
                ready_s, decisions = engine.ready_s, engine.ready.decisions
                print(f"ready after {ready_s:.1f} s: {'; '.join(decisions)}", file=sys.stderr, flush=True)
                results = measure_rows(engine, rows, options.rounds, _progress)
            finally:
                engine.shutdown()
        parts = profile_steps(args, PROFILED_ROWS) if options.profile else []
    return GpuReport(_card(), settings, ready_s, results, parts, decisions)


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the GPU suite", f"rows: {', '.join(row.name for row in GPU_SUITE)}")
    group.add_argument("--attention-backend", default="auto", help="as the engine's option; default auto")
    group.add_argument(
        "--cudagraph-mode", default="auto", help="which steps are replayed as CUDA graphs: NONE, FULL, …; default auto"
    )
    group.add_argument("--rounds", type=int, default=2, help="the best counts; 0: only the profile")
    group.add_argument("--profile", action="store_true", help="also milliseconds per part of a decode step")
    group.add_argument("--in-process", action="store_true", help="the engine in this process, not one of its own")


def _settings(options: argparse.Namespace, rows: list[GpuRow]) -> dict[str, Any]:
    longest = max(row.workload.prompt_tokens + row.workload.output_tokens for row in rows)
    return {
        "load_format": "dummy",
        "dtype": options.dtype,
        "kernels": options.kernels,
        "attention_backend": options.attention_backend,
        "cudagraph_mode": options.cudagraph_mode,
        "max_model_len": LONGEST_TOKENS if longest > 16384 else 16384,
        "memory_fraction": 0.85,
    }


def _card() -> str:
    if not torch.cuda.is_available():
        return f"no card, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
