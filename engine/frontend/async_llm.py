"""The engine for a server: many streams over one engine process, from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Unpack

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import START_TIMEOUT_S, AsyncMPClient
from inferd.engine.core.launch import OnLine
from inferd.engine.errors import EngineDeadError
from inferd.engine.frontend.inputs import InputProcessor, PreparedRequest, Prompt, RequestFields
from inferd.engine.frontend.outputs import RequestOutput, RequestOutputCollector
from inferd.engine.frontend.processor import OutputProcessor
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import EngineReady, SchedulerStats
from inferd.engine.params import SamplingParams

logger = logging.getLogger(__name__)

OUTPUTS_AT_ONCE = 128  # between two turns of the event loop
LONG_TEXT_CHARS = 20_000  # longer prompts are turned into tokens on a thread


class AsyncLLM:
    """One loaded model in one engine process. Everything is called on the event loop that started it.

    A stream ends by itself, by `abort`, or by closing its generator, which aborts the request in the engine. When the
    engine dies, every stream raises `EngineDeadError`, and so does every later use.
    """

    def __init__(self, client: AsyncMPClient, tokenizer: Tokenizer) -> None:
        """For `start`."""
        self.tokenizer = tokenizer
        self._client = client
        self._inputs = InputProcessor(
            tokenizer, max_model_len=client.ready.max_model_len, vocab_size=client.ready.vocab_size
        )
        self._outputs = OutputProcessor(tokenizer)
        # The task must not hold `self`, or an engine that is dropped would never be collected and stopped.
        self._handler = asyncio.create_task(_handle_outputs(client, self._outputs), name="engine-outputs")
        self._abandon = weakref.finalize(self, client.kill)

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        run_dir: Path,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        on_line: OnLine | None = None,
    ) -> AsyncLLM:
        """Returns when the model is loaded; call it on the main thread.

        Raises what kept the engine from starting: `ConfigError`, `LoadError`, `EngineDeadError`. Cancelling it ends the
        engine. `on_line` gets every line that the engine process prints, on another thread.
        """
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, args.model)
        client = await AsyncMPClient.start(args, run_dir, start_timeout_s=start_timeout_s, on_line=on_line)
        return cls(client, tokenizer)

    @property
    def ready(self) -> EngineReady:
        return self._client.ready

    @property
    def is_alive(self) -> bool:
        return self._client.death is None

    @property
    def stats(self) -> SchedulerStats:
        """As of the engine's last output."""
        return self._client.stats

    @property
    def last_heartbeat(self) -> float:
        """Monotonic time of the engine's last message; an idle engine sends one every two seconds."""
        return self._client.last_heartbeat_s

    @property
    def num_unfinished(self) -> int:
        return self._outputs.num_unfinished

    def prepare(self, prompt: Prompt, params: SamplingParams, **fields: Unpack[RequestFields]) -> PreparedRequest:
        """Checks a request without starting it, so that errors and warnings are known before a stream begins.

        Raises `InvalidRequest`.
        """
        return self._inputs.process(prompt, params, **fields)

    async def generate(
        self, prompt: Prompt | PreparedRequest, params: SamplingParams | None = None, **fields: Unpack[RequestFields]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as they come; several are merged when the consumer is slow.

        `params` and `fields` belong to a prompt that is not prepared. Raises `InvalidRequest`, `RequestFailed`,
        `EngineDeadError`.
        """
        request = prompt if isinstance(prompt, PreparedRequest) else await self._prepare(prompt, params, fields)
        collector = RequestOutputCollector(request.add.params.output_kind)
        adds = self._outputs.add(request, collector)
        try:
            for add in adds:
                await self._client.add(add)
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            await self._abort([request.add.request_id])

    async def abort(self, request_id: str) -> None:
        """Ends every stream that was named so, with `FinishReason.ABORT`."""
        await self._abort(self._outputs.internal_ids(request_id))

    async def call(self, method: str, *args: Any) -> Any:
        """A control call to the engine by name; raises `EngineError` for what goes wrong there."""
        return await self._client.call(method, *args)

    async def wait_dead(self) -> EngineDeadError:
        """Returns once the engine is gone, however it went: why, and its last lines."""
        return await self._client.wait_dead()

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Streams may finish within `drain_s`, the rest is aborted; then the process ends. Idempotent."""
        self._abandon.detach()
        await self._client.shutdown(drain_s)
        await self._handler

    async def _prepare(self, prompt: Prompt, params: SamplingParams | None, fields: RequestFields) -> PreparedRequest:
        params = params or SamplingParams()
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self.prepare, prompt, params, **fields)
        return self.prepare(prompt, params, **fields)

    async def _abort(self, internal_ids: list[str]) -> None:
        """Those that are still live, here and in the engine."""
        live_ids = self._outputs.abort(internal_ids).ids_to_abort
        if live_ids:
            with contextlib.suppress(EngineDeadError):  # then there is nothing left to abort
                await self._client.abort(live_ids)


async def _handle_outputs(client: AsyncMPClient, processor: OutputProcessor) -> None:
    """Until the engine is dead. A failure in here kills it: then every stream hears of it, instead of waiting on."""
    while True:
        try:
            await _handle_next(client, processor)
        except EngineDeadError as error:
            processor.fail_all(error)
            return
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            processor.fail_all(EngineDeadError("the engine's outputs are no longer read"))
            raise
        except BaseException:  # a panic of the tokenizer's library is no Exception
            logger.exception("the engine's outputs cannot be handled; the engine is stopped")
            client.kill()


async def _handle_next(client: AsyncMPClient, processor: OutputProcessor) -> None:
    outputs = (await client.get_outputs()).outputs
    for start in range(0, len(outputs), OUTPUTS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        processed = processor.process(outputs[start : start + OUTPUTS_AT_ONCE])
        if processed.ids_to_abort:
            await client.abort(processed.ids_to_abort)
