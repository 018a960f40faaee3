"""A started engine together with what turns chats and prompts into its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from inferd.appliance.chat.answer import AnswerFormat
from inferd.appliance.chat.messages import ChatMessage
from inferd.appliance.chat.renderer import ChatRenderer
from inferd.appliance.chat.tools.format import Tool
from inferd.appliance.requests.live import LiveRequest
from inferd.appliance.supervisor.errors import ModelUnavailable
from inferd.engine.config import EngineArgs
from inferd.engine.errors import EngineDeadError
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.frontend.inputs import PreparedRequest, Prompt, RequestFields, TokensPrompt
from inferd.engine.frontend.outputs import RequestOutput
from inferd.engine.messages import FinishReason, MemoryRecord
from inferd.engine.model_config import read_json
from inferd.engine.params import SamplingParams
from inferd.engine.pooling.checks import refuse_generation
from inferd.engine.pooling.inputs import PoolingPrompt
from inferd.engine.pooling.params import PoolingParams

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LONG_PROMPT = 4096  # characters or ids; longer ones are looked at on a thread, because milliseconds count for streams


class ServedModel:
    """One model that answers. `sampling_defaults` are what its authors recommend, by field of `SamplingParams`."""

    def __init__(
        self,
        llm: AsyncLLM,
        sampling_defaults: Mapping[str, Any],
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """Raises `ValueError` for a parser that nobody knows."""
        self.llm = llm
        self.sampling_defaults = sampling_defaults
        self.answers = AnswerFormat(llm.tokenizer, tool_parser, reasoning_parser)
        self.memory: tuple[MemoryRecord, ...] = ()  # of each rank, as of the last load, sleep or wake
        self._chat = ChatRenderer(llm.tokenizer, self.answers.tools if self.answers.knows_tools else None)
        self._stopping = False

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        run_dir: Path,
        start_timeout_s: float,
        recommended: Mapping[str, float] | None = None,
        on_line: Callable[[str], None] | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> ServedModel:
        """`recommended` are sampling defaults that stand behind those of the model's own files. `on_line` gets what the
        engine prints, on another thread. The parsers are named as in `AnswerFormat`.

        Raises what kept the engine from starting. Cancelling it ends the engine.
        """
        llm = await AsyncLLM.start(args, run_dir, start_timeout_s=start_timeout_s, on_line=on_line)
        try:
            defaults = {**(recommended or {}), **read_sampling_defaults(Path(args.model))}
            served = cls(llm, defaults, tool_parser, reasoning_parser)
            await asyncio.to_thread(served._chat.start)
            await served._measure()
            return served
        except BaseException:
            await llm.shutdown()
            raise

    @property
    def is_alive(self) -> bool:
        return self.llm.is_alive

    @property
    def pid(self) -> int:
        return self.llm.ready.pid

    @property
    def max_model_len(self) -> int:
        return self.llm.ready.max_model_len

    @property
    def last_heartbeat(self) -> float:
        return self.llm.last_heartbeat

    async def wait_dead(self) -> EngineDeadError:
        return await self.llm.wait_dead()

    async def sleep(self, level: int) -> None:
        """Raises `EngineError`."""
        await self.llm.call("sleep", level)
        await self._measure()

    async def wake(self) -> None:
        """Raises `EngineError`."""
        await self.llm.call("wake")
        await self._measure()

    def kill(self) -> None:
        self.llm.kill()

    async def shutdown(self, drain_s: float) -> None:
        self._stopping = self._stopping or self.llm.is_alive
        await self.llm.shutdown(drain_s)
        await asyncio.to_thread(self._chat.close)

    async def _measure(self) -> None:
        self.memory = tuple(msgspec.convert(await self.llm.call("memory"), list[MemoryRecord]))

    async def chat_token_ids(
        self, messages: list[ChatMessage], options: Mapping[str, Any], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Raises `InvalidRequest`."""
        if (pooling := self.llm.ready.pooling) is not None:
            refuse_generation(pooling.tasks)
        return await asyncio.to_thread(self._chat.token_ids, messages, options, tools)

    async def prepare(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, cache_salt: str | None, live: LiveRequest
    ) -> PreparedRequest:
        """Checked against this model, not started. Raises `InvalidRequest`."""
        fields = _fields(live, request_id, cache_salt)
        length = len(prompt.prompt_token_ids if isinstance(prompt, TokensPrompt) else prompt)
        if length > LONG_PROMPT:
            return await asyncio.to_thread(self.llm.prepare, prompt, params, **fields)
        return self.llm.prepare(prompt, params, **fields)

    async def prepare_pooling(
        self, prompts: Sequence[PoolingPrompt], params: PoolingParams, *, request_id: str, live: LiveRequest
    ) -> list[PreparedRequest]:
        """As `prepare`, of texts for a model that pools; on a thread, because there may be thousands."""

        def prepare_all() -> list[PreparedRequest]:
            return [
                self.llm.prepare_pooling(prompt, params, **_fields(live, f"{request_id}-{index}"))
                for index, prompt in enumerate(prompts)
            ]

        return await asyncio.to_thread(prepare_all)

    def begin(
        self, live: LiveRequest, prepared: Sequence[PreparedRequest]
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """The outputs of each; they count for `live`."""
        live.begin(prepared, self.llm)
        return [self._generate(request, live, index) for index, request in enumerate(prepared)]

    async def _generate(
        self, request: PreparedRequest, live: LiveRequest, index: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Every stream ends with a finish reason that clients know. Closing the generator aborts the request.

        Raises `EngineDeadError`, `RequestFailed`, `RequestCancelled`, and `ModelUnavailable` when the engine was told
        to stop.
        """
        try:
            async with aclosing(self.llm.generate(request)) as outputs:
                async for output in outputs:
                    live.count(index, output)
                    if any(choice.finish_reason is FinishReason.ABORT for choice in output.outputs):
                        live.raise_if_cancelled()
                        raise EngineDeadError("the engine gave this request up")
                    yield output
        except Exception as error:
            live.broke(error)
            if self._stopping and isinstance(error, EngineDeadError):
                raise ModelUnavailable("this server is shutting down", 5.0, "draining") from None
            raise

    def token_text(self, token_id: int) -> str:
        return self.llm.tokenizer.decode([token_id], skip_special_tokens=False)

    def prompt_text(self, request: PreparedRequest) -> str:
        if request.prompt is not None:
            return request.prompt
        return self.llm.tokenizer.decode(request.add.prompt_token_ids, skip_special_tokens=False)


def _fields(live: LiveRequest, request_id: str, cache_salt: str | None = None) -> RequestFields:
    caller = live.caller
    return {
        "request_id": request_id,
        "cache_salt": live.caller.salted(cache_salt),
        "client": caller.client,
        "lane": caller.lane,
        "priority": caller.priority,
    }


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """From `generation_config.json`, unless it says that its authors decode greedily."""
    path = folder / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    if values.get("do_sample") is False:
        return {}
    return {name: values[name] for name in SAMPLING_DEFAULTS if values.get(name) is not None}
