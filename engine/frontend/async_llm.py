"""The engine for a server: many streams over one engine process, from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import START_TIMEOUT_S, AsyncMPClient
from inferd.engine.core.launch import OnLine
from inferd.engine.errors import EngineDeadError
from inferd.engine.frontend.inputs import InputProcessor, PreparedRequest, Prompt, RequestFields
from inferd.engine.frontend.insight import AsyncEngineInsight
from inferd.engine.frontend.lora import LoRARequest
from inferd.engine.frontend.outputs import RequestOutput, RequestOutputCollector
from inferd.engine.frontend.processor import OutputProcessor
from inferd.engine.frontend.stats import LatencyMeter, LatencyObserver
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.lora.adapter import AdapterInfo
from inferd.engine.messages import EngineReady, FeedUpdate, MemoryRecord, SchedulerStats, SleepReport, WakeReport
from inferd.engine.params import SamplingParams
from inferd.engine.pooling.inputs import PoolingInputs, PoolingPrompt
from inferd.engine.pooling.outputs import PoolingOutput
from inferd.engine.pooling.params import PoolingParams

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
        ready = client.ready
        self._inputs = InputProcessor(
            tokenizer, max_model_len=ready.max_model_len, vocab_size=ready.vocab_size, pooling=ready.pooling
        )
        self._pooling_inputs = PoolingInputs(tokenizer, ready)
        self._outputs = OutputProcessor(tokenizer)
        self.insight = AsyncEngineInsight(client)
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

    def prepare_pooling(
        self, prompt: PoolingPrompt, params: PoolingParams, **fields: Unpack[RequestFields]
    ) -> PreparedRequest:
        """As `prepare`, of a request for `encode`."""
        return self._pooling_inputs.process(prompt, params, **fields)

    async def encode(
        self,
        prompt: PoolingPrompt | PreparedRequest,
        params: PoolingParams | None = None,
        **fields: Unpack[RequestFields],
    ) -> PoolingOutput:
        """The vector or score of one text, from a model that pools. Cancelling it aborts the request.

        `params` and `fields` belong to a prompt that is not prepared. Raises `InvalidRequest`, `RequestFailed`,
        `EngineDeadError`.
        """
        if not isinstance(prompt, PreparedRequest):
            given = params or PoolingParams()
            prompt = await asyncio.to_thread(self.prepare_pooling, prompt, given, **fields)
        async with contextlib.aclosing(self.generate(prompt)) as outputs:
            return PoolingOutput.of(await anext(outputs))

    async def generate(
        self, prompt: Prompt | PreparedRequest, params: SamplingParams | None = None, **fields: Unpack[RequestFields]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as they come; several are merged when the consumer is slow.

        `params` and `fields` belong to a prompt that is not prepared; a `lora_request` with a path is loaded first, as
        by `add_lora`. Raises `InvalidRequest`, `RequestFailed`, `EngineDeadError`.
        """
        request = prompt if isinstance(prompt, PreparedRequest) else await self._prepare(prompt, params, fields)
        lora = fields.get("lora_request")
        if lora is not None and lora.lora_path is not None:
            await self.add_lora(lora)
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

    def observe(self, observer: LatencyObserver | None) -> None:
        """From now on `observer` is told what latency histograms are made of; there is one at most."""
        self._outputs.meter = None if observer is None else LatencyMeter(observer)

    def feed(self) -> AsyncGenerator[FeedUpdate, None]:
        """What is going on in the engine; see `AsyncEngineInsight`."""
        return self.insight.feed()

    def engine_ids(self, request_id: str) -> list[str]:
        """The engine's own ids of the unfinished streams that were named so."""
        return self._outputs.internal_ids(request_id)

    async def call(self, method: str, *args: Any) -> Any:
        """A control call to the engine by name; raises `EngineError` for what goes wrong there."""
        return await self._client.call(method, *args)

    async def add_lora(self, lora_request: LoRARequest) -> int:
        """Load an adapter, unless it is there from that folder already; its id. Raises `EngineError`."""
        return int(await self.call("add_lora", lora_request.lora_name, lora_request.lora_path))

    async def remove_lora(self, lora_name: str) -> int:
        """No request finds it from now on; how many that have it already go on to their end. Raises `EngineError`."""
        return int(await self.call("remove_lora", lora_name))

    async def list_loras(self) -> list[AdapterInfo]:
        return msgspec.convert(await self.call("list_loras"), list[AdapterInfo])

    async def sleep(self, level: int = 1, mode: str = "wait", requests: str = "hold") -> SleepReport:
        """Give the engine's memory back: at level 1 all but what lets it wake soon, at level 2 all.

        What runs is finished first ("wait"), kept and computed again afterwards ("keep"), ended ("abort") or in the way
        ("refuse"). Requests that come before `wake` has all memory back are held, or refused. Raises `EngineError`.
        """
        return msgspec.convert(await self.call("sleep", level, mode, requests), SleepReport)

    async def wake(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Have it again, all of it or what has these tags ("weights", "kv_cache"). Raises `EngineError`."""
        return msgspec.convert(await self.call("wake", None if tags is None else list(tags)), WakeReport)

    async def is_sleeping(self) -> bool:
        """Whether any of it is missing."""
        return bool(await self.call("is_sleeping"))

    async def memory(self) -> list[MemoryRecord]:
        """By rank."""
        return msgspec.convert(await self.call("memory"), list[MemoryRecord])

    async def wait_dead(self) -> EngineDeadError:
        """Returns once the engine is gone, however it went: why, and its last lines."""
        return await self._client.wait_dead()

    def kill(self) -> None:
        """Ends the process without a word to it, as one that does not answer any more: `wait_dead` and every stream
        hear of it.
        """
        self._client.kill()

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
    message = await client.get_outputs()
    outputs = message.outputs
    for start in range(0, len(outputs), OUTPUTS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        processed = processor.process(outputs[start : start + OUTPUTS_AT_ONCE], message.at)
        if processed.ids_to_abort:
            await client.abort(processed.ids_to_abort)
