"""`inferd bench`: this engine, and others on the same weights, on the same work in one run."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import torch

from inferd.engine.bench.copying import measure_copying
from inferd.engine.bench.feed_cost import measure_feed_cost
from inferd.engine.bench.gpu import add_gpu_options, run_gpu_suite
from inferd.engine.bench.gpu_report import GpuReport
from inferd.engine.bench.peers import Inferd, Peer, Transformers
from inferd.engine.bench.quality import measure_quality
from inferd.engine.bench.report import Report
from inferd.engine.bench.timing import measure
from inferd.engine.bench.workloads import CPU_SUITE, Workload
from inferd.engine.config import EngineArgs
from inferd.engine.errors import EngineError
from inferd.engine.frontend.llm import LLM
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.resolve import resolve

FEED_ROW = "feed"
COPY_ROW = "copy"
QUALITY_QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse.",
    "Explain how rain forms.",
    "List three uses of copper.",
    "Why do cats purr?",
)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.suite == "cpu" and options.model is None:
        parser.error("--model is required")
    report: Report | GpuReport
    try:
        report = run_gpu_suite(options) if options.suite == "gpu" else run(options)
    except (EngineError, ValueError) as error:
        print(f"inferd bench: {error}", file=sys.stderr)
        return 1
    print(report.as_text())
    if options.json is not None:
        options.json.write_text(report.as_json() + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> Report:
    args = EngineArgs(model=str(options.model), dtype=options.dtype, kernels=options.kernels)
    config = resolve(args)
    load_s = _time_to_ready(args)
    ours = Inferd(LLM(args.model, in_process=True, dtype=args.dtype, kernels=args.kernels))
    peers: list[Peer] = [ours]
    if options.peer == "transformers":
        peers.append(Transformers(options.model, TORCH_DTYPES[config.dtype]))
    rows = measure(peers, _workloads(options.rows), config.model.vocab_size, _progress)
    feed = None
    if options.rows is None or FEED_ROW in options.rows.split(","):
        (b32,) = _workloads("b32")
        feed = measure_feed_cost(ours, b32, config.model.vocab_size, _progress)
    for peer in peers:
        peer.close()
    is_copied = options.rows is None or COPY_ROW in options.rows.split(",")
    copying = measure_copying(args, _progress) if is_copied else None
    quality = measure_quality(args, _quality_prompts(options.model)) if options.quality else None
    decisions = list(config.decisions)
    return Report(_machine(), config.model.path.name, config.dtype, load_s, rows, quality, decisions, feed, copying)


def _progress(text: str) -> None:
    """On stderr, because a whole run takes minutes and stdout is the report's."""
    print(text, file=sys.stderr, flush=True)


def _time_to_ready(args: EngineArgs) -> float:
    """From starting the engine's process to its first readiness for a request."""
    began = time.perf_counter()
    llm = LLM(args.model, dtype=args.dtype, kernels=args.kernels)
    seconds = time.perf_counter() - began
    llm.shutdown()
    return seconds


def _workloads(names: str | None) -> list[Workload]:
    wanted = names.split(",") if names else [workload.name for workload in CPU_SUITE]
    return [workload for workload in CPU_SUITE if workload.name in wanted]


def _quality_prompts(folder: Path) -> list[list[int]]:
    from inferd.engine.frontend.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    return [tokenizer.encode(question) for question in QUALITY_QUESTIONS]


def _machine() -> str:
    name = platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _parser() -> argparse.ArgumentParser:
    names = ", ".join([*(workload.name for workload in CPU_SUITE), FEED_ROW, COPY_ROW])
    parser = argparse.ArgumentParser(prog="inferd bench", description=__doc__)
    parser.add_argument(
        "--suite",
        default="cpu",
        choices=["cpu", "gpu"],
        help="cpu: a model of the library, on what this machine has; gpu: shapes of an 8B model, on a card",
    )
    parser.add_argument(
        "--model", type=Path, help="a name of the library, or a model folder; the GPU suite makes its own"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16"],
        help="what weights and activations are computed in; default auto: what an engine takes here by itself",
    )
    parser.add_argument(
        "--kernels",
        default="auto",
        choices=["auto", "native", "torch"],
        help="native: our own kernels, or an error where they cannot run; torch: their plain twins; default auto",
    )
    parser.add_argument("--peer", choices=["transformers"], help="time this one too, in the same run")
    parser.add_argument("--rows", help=f"comma-separated workloads out of: {names}")
    parser.add_argument("--no-quality", dest="quality", action="store_false", help="leave out the float32 comparison")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    add_gpu_options(parser)
    return parser
