"""Offline batches: a list of prompts in, a list of outputs in the same order out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inferd.engine.config import EngineArgs
from inferd.engine.errors import EngineDeadError, InvalidRequest
from inferd.engine.frontend.inputs import Prompt, TokensPrompt
from inferd.engine.frontend.llm_engine import LLMEngine
from inferd.engine.frontend.outputs import RequestOutput
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.params import OutputKind, SamplingParams

logger = logging.getLogger(__name__)


class LLM:
    """One loaded model; a context manager. `model` is a model folder, `engine_args` are fields of `EngineArgs`.

    The engine runs in a process of its own unless `in_process` is set. `run_dir` holds its sockets; without one a
    private folder below the system's temporary one is used.
    """

    def __init__(
        self, model: str | Path, *, in_process: bool = False, run_dir: Path | None = None, **engine_args: Any
    ) -> None:
        """Raises `ConfigError`, `LoadError`, or `EngineDeadError` when the engine cannot start."""
        args = EngineArgs(model=str(model), **engine_args)
        self._engine = LLMEngine.from_args(args, in_process=in_process, run_dir=run_dir)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One output per prompt, in the order of the prompts; `params` for all of them or one for each.

        When a prompt is invalid, or the engine fails one, the others are aborted and the error is raised:
        `InvalidRequest`, `RequestFailed`. `progress` shows a bar if there is a terminal to show it on.
        """
        batch = _as_list(prompts)
        try:
            self._add_all(batch, _params_for(params, len(batch)))
            return self._run(len(batch), progress)
        except EngineDeadError:
            raise
        except BaseException:
            self._engine.abort_all()
            raise

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, as after a change of weights; False while any request holds blocks."""
        return bool(self._engine.call("reset_prefix_cache"))

    def shutdown(self) -> None:
        """Idempotent."""
        self._engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def _add_all(self, prompts: list[Prompt], params: list[SamplingParams]) -> None:
        for index, (prompt, own_params) in enumerate(zip(prompts, params, strict=True)):
            final = msgspec.structs.replace(own_params, output_kind=OutputKind.FINAL_ONLY)
            request = self._engine.add_request(prompt, final, request_id=str(index))
            for warning in request.warnings:
                logger.warning("prompt %d: %s", index, warning)

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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | TokensPrompt) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


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
