"""Offline batches: a list of prompts in, a list of outputs in the same order out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inferd.engine.config import EngineArgs
from inferd.engine.errors import EngineDeadError, InvalidRequest
from inferd.engine.frontend.inputs import PreparedRequest, Prompt
from inferd.engine.frontend.insight import EngineInsight
from inferd.engine.frontend.llm_engine import LLMEngine
from inferd.engine.frontend.lora import LoRARequest, adapters_for
from inferd.engine.frontend.model_names import model_folder
from inferd.engine.frontend.outputs import RequestOutput
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.lora.adapter import AdapterInfo
from inferd.engine.messages import MemoryRecord, PoolingInfo, SchedulerStats, SleepReport, WakeReport
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.pooling.inputs import PoolingPrompt
from inferd.engine.pooling.offline import PoolingCalls, as_list
from inferd.engine.pooling.outputs import PoolingOutput
from inferd.engine.pooling.params import PoolingParams

logger = logging.getLogger(__name__)


class LLM(PoolingCalls):
    """One loaded model; a context manager. `model` is a model folder or a name of the library, `engine_args` are fields
    of `EngineArgs`.

    The engine runs in a process of its own unless `in_process` is set. `run_dir` holds its sockets; without one a
    private folder below the system's temporary one is used.
    """

    def __init__(
        self, model: str | Path, *, in_process: bool = False, run_dir: Path | None = None, **engine_args: Any
    ) -> None:
        """Raises `ConfigError`, `LoadError`, or `EngineDeadError` when the engine cannot start."""
        args = EngineArgs(model=str(model_folder(model)), **engine_args)
        self._engine = LLMEngine.from_args(args, in_process=in_process, run_dir=run_dir)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One output per prompt, in the order of the prompts; `params` and `lora_request` for all of them or one for
        each.

        When a prompt is invalid, or the engine fails one, the others are aborted and the error is raised:
        `InvalidRequest`, `RequestFailed`. `progress` shows a bar if there is a terminal to show it on.
        """
        batch = as_list(prompts)
        own_params, adapters = _params_for(params, len(batch)), adapters_for(lora_request, len(batch))
        return self._finish_all(lambda: self._add_all(batch, own_params, adapters), len(batch), progress)

    def add_lora(self, lora_request: LoRARequest) -> int:
        """Load an adapter, unless it is there from that folder already; its id. Raises `EngineError`."""
        return self._engine.add_lora(lora_request)

    def remove_lora(self, lora_name: str) -> int:
        """No prompt finds it from now on; how many requests still have it. Raises `EngineError`."""
        return self._engine.remove_lora(lora_name)

    def list_loras(self) -> list[AdapterInfo]:
        return self._engine.list_loras()

    @property
    def pooling(self) -> PoolingInfo | None:
        """What a model that pools can be asked for; None of one that generates."""
        return self._engine.pooling

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, as after a change of weights; False while any request holds blocks."""
        return bool(self._engine.call("reset_prefix_cache"))

    def sleep(self, level: int = 1) -> SleepReport:
        """Give the engine's memory back: at level 1 all but what lets it wake soon, at level 2 all.

        Until `wake` prompts are refused, since nothing else could wake it meanwhile. Raises `EngineError`.
        """
        return msgspec.convert(self._engine.call("sleep", level, "wait", "refuse"), SleepReport)

    def wake(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Have it again, all of it or what has these tags ("weights", "kv_cache"). Raises `EngineError`."""
        return msgspec.convert(self._engine.call("wake", None if tags is None else list(tags)), WakeReport)

    def is_sleeping(self) -> bool:
        """Whether any of it is missing."""
        return bool(self._engine.call("is_sleeping"))

    def memory(self) -> list[MemoryRecord]:
        """By rank."""
        return msgspec.convert(self._engine.call("memory"), list[MemoryRecord])

    def stats(self) -> SchedulerStats:
        """As of the last step."""
        return SchedulerStats(**self._engine.call("stats"))

    @property
    def insight(self) -> EngineInsight:
        """What is going on in the engine."""
        return self._engine.insight

    def shutdown(self) -> None:
        """Idempotent."""
        self._engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def _pool(self, prompts: Sequence[PoolingPrompt], params: PoolingParams, progress: bool) -> list[PoolingOutput]:
        def add_all() -> None:
            for index, prompt in enumerate(prompts):
                request = self._engine.add_pooling_request(prompt, params, request_id=str(index))
                _warn(index, request)

        return [PoolingOutput.of(output) for output in self._finish_all(add_all, len(prompts), progress)]

    def _finish_all(self, add_all: Callable[[], None], num_prompts: int, progress: bool) -> list[RequestOutput]:
        try:
            add_all()
            return self._run(num_prompts, progress)
        except EngineDeadError:
            raise
        except BaseException:
            self._engine.abort_all()
            raise

    def _add_all(self, prompts: list[Prompt], params: list[SamplingParams], adapters: list[LoRARequest | None]) -> None:
        for adapter in dict.fromkeys(adapters):
            if adapter is not None and adapter.lora_path is not None:
                self._engine.add_lora(adapter)
        for index, (prompt, own_params, adapter) in enumerate(zip(prompts, params, adapters, strict=True)):
            final = msgspec.structs.replace(own_params, output_kind=OutputKind.FINAL_ONLY)
            named = LoRARequest(adapter.lora_name) if adapter is not None else None
            _warn(index, self._engine.add_request(prompt, final, request_id=str(index), lora_request=named))

    def _run(self, num_prompts: int, progress: bool) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        with _progress_bar(num_prompts, progress) as advance:
            while self._engine.num_unfinished:
                for output in self._engine.step():
                    if output.error is not None:
                        raise output.failure(f"prompt {output.request_id}: ")
                    outputs[int(output.request_id)] = output
                    advance(output)
        return [outputs[index] for index in range(num_prompts)]


def _warn(index: int, request: PreparedRequest) -> None:
    for warning in request.warnings:
        logger.warning("prompt %d: %s", index, warning)


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequest(f"{num_prompts} prompts but {len(params)} sampling params", param="params")
    return list(params)


@contextmanager
def _progress_bar(num_prompts: int, wanted: bool) -> Iterator[Any]:
    """Yields a function that counts a finished output."""
    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not (wanted and console.is_terminal)
    ) as bar:
        task = bar.add_task("prompts", total=num_prompts, rate="")
        num_tokens = 0

        def advance(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += output.num_output_tokens
            elapsed_s = bar.tasks[0].elapsed
            bar.update(task, advance=1, rate=f"{num_tokens / elapsed_s:.0f} tok/s" if elapsed_s else "")

        yield advance
