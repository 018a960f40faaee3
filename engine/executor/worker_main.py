"""A worker process: one rank, told what to do through shared memory. `MultiprocExecutor` starts it."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch
from msgspec.structs import asdict

from inferd.engine.core.lines import FORMAT
from inferd.engine.core.parent import die_with_parent
from inferd.engine.errors import EngineError
from inferd.engine.executor.shm import RingReader, RingWriter
from inferd.engine.executor.wire import (
    EXECUTE,
    OUTPUT_RANK,
    SAMPLE,
    Done,
    Execute,
    Failed,
    FromWorker,
    RankCall,
    Sample,
    Sampled,
    Stop,
    ToWorker,
    WorkerStart,
    decode_start,
    make_encoder,
    pack,
    to_worker_decoder,
    unpack,
)
from inferd.engine.worker.parallel_state import ParallelState
from inferd.engine.worker.worker import Worker, rank_device

MakeWorker = Callable[[WorkerStart, ParallelState], Worker]


def main(argv: list[str] | None = None, make_worker: MakeWorker | None = None) -> None:
    parser = argparse.ArgumentParser(description="One rank of an inference engine; started by the engine.")
    parser.add_argument("--start-fd", type=int, required=True, help="JSON written by the starting process")
    with os.fdopen(parser.parse_args(argv).start_fd, "rb") as file:
        start = decode_start(file.read())
    die_with_parent(start.death_fd, start.parent_pid, kernel_signal=start.kernel_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process in order
    form = FORMAT.replace("%(name)s", f"%(name)s[{start.rank}]")
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    WorkerLoop(start, make_worker or _make_worker).run()


def _make_worker(start: WorkerStart, state: ParallelState) -> Worker:
    return Worker(start.config, state)


class WorkerLoop:
    """Does what it is told in the order it is told. A failure is answered, and ends nothing: that is the executor's."""

    def __init__(self, start: WorkerStart, make_worker: MakeWorker) -> None:
        self._start = start
        self._make_worker = make_worker
        self._inbox = RingReader(start.steps)
        self._outbox = RingWriter(start.replies)
        self._encoder = make_encoder()
        self._decoder = to_worker_decoder()
        self._state = ParallelState.alone()
        self._worker: Worker | None = None
        self._calls: dict[str, Callable[..., object]] = {
            "load": self._load,
            "decisions": lambda: self.worker.decisions,
            "kv_specs": lambda: self.worker.kv_specs(),
            "available_kv_bytes": self._available_kv_bytes,
            "initialize_kv_cache": lambda config: self.worker.initialize_kv_cache(config),
            "warm_up": self._warm_up,
            "load_lora": lambda adapter_id, path: self.worker.load_lora(adapter_id, path),
            "unload_lora": lambda adapter_id: self.worker.unload_lora(adapter_id),
            "sleep_refusal": lambda: self.worker.sleep_refusal(),
            "sleep": lambda level: self.worker.sleep(level),
            "wake": lambda tags: self.worker.wake(tags),
            "memory": lambda: asdict(self.worker.memory()),
        }
        """What a `RankCall` may name; nothing else of the worker can be reached by name."""

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the worker has nothing loaded yet")
        return self._worker

    def run(self) -> None:
        while not isinstance(message := self._receive(), Stop):
            try:
                answer = self._handle(message)
            except Exception as error:
                answer = _failed(message, error)
            if answer is not None:
                self._outbox.write(self._encoder.encode(answer))
        if self._worker is not None:
            self._worker.shutdown()
        self._state.leave()

    def _receive(self) -> ToWorker:
        data = self._inbox.read()
        assert data is not None  # it waits without a limit
        return self._decoder.decode(data)

    def _handle(self, message: Execute | Sample | RankCall) -> FromWorker | None:
        """None where another rank answers."""
        answers = self._start.rank == OUTPUT_RANK
        if isinstance(message, Execute):
            self.worker.execute_model(message.output)
            return Done(message.number) if answers else None
        if isinstance(message, Sample):
            output = self.worker.sample_tokens(message.bitmask)
            return Sampled(message.number, output) if answers else None
        return Done(message.number, pack(self._calls[message.method](*unpack(message.args))))

    def _load(self) -> list[str]:
        """Meets the other ranks, then loads this one's part."""
        start = self._start
        device = rank_device(start.config, start.rank)
        if device.index is not None:
            torch.cuda.set_device(device)
        sizes = {"tp": start.config.parallel.tensor_parallel_size}
        self._state = ParallelState.join(start.rank, sizes, device, f"/proc/self/fd/{start.store_fd}")
        self._worker = self._make_worker(start, self._state)
        self._worker.load()
        return self._worker.decisions

    def _available_kv_bytes(self) -> int:
        self._state.tp.barrier()  # a rank that still loads would hold memory later that seems free now
        return self.worker.available_kv_bytes()

    def _warm_up(self) -> None:
        self.worker.warm_up()
        gc.collect()
        gc.freeze()  # what start-up left is never garbage, and walking it would be a pause in every step


def _name(message: Execute | Sample | RankCall) -> str:
    if isinstance(message, RankCall):
        return message.method
    return EXECUTE if isinstance(message, Execute) else SAMPLE


def _failed(message: Execute | Sample | RankCall, error: Exception) -> Failed:
    """Not logged here: when one rank is lost the others fail too, and only the executor knows what came first."""
    said, code = f"{type(error).__name__}: {error}", "internal"
    if isinstance(error, EngineError):
        said, code = str(error), error.code
    return Failed(message.number, _name(message), said, code, traceback.format_exc())


if __name__ == "__main__":
    main()
