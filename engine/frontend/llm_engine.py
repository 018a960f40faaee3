"""The engine for ordinary code: add requests, then step until nothing is left."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Unpack

import msgspec

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import EngineCoreClient, InprocClient, MPClient
from inferd.engine.frontend.inputs import InputProcessor, PreparedRequest, Prompt, RequestFields
from inferd.engine.frontend.insight import EngineInsight
from inferd.engine.frontend.lora import LoRARequest
from inferd.engine.frontend.outputs import RequestOutput
from inferd.engine.frontend.processor import OutputProcessor
from inferd.engine.frontend.stats import LatencyMeter, LatencyObserver
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.lora.adapter import AdapterInfo
from inferd.engine.messages import PoolingInfo
from inferd.engine.params import SamplingParams
from inferd.engine.pooling.inputs import PoolingInputs, PoolingPrompt
from inferd.engine.pooling.params import PoolingParams


class LLMEngine:
    """Text in and text out over one `EngineCoreClient`, which it owns. Used by one thread."""

    def __init__(self, client: EngineCoreClient, tokenizer: Tokenizer | None) -> None:
        ready = client.ready
        self.tokenizer = tokenizer
        self._client = client
        self.insight = EngineInsight(client)
        self._inputs = InputProcessor(
            tokenizer, max_model_len=ready.max_model_len, vocab_size=ready.vocab_size, pooling=ready.pooling
        )
        self._pooling_inputs = PoolingInputs(tokenizer, ready)
        self._outputs = OutputProcessor(tokenizer)

    @classmethod
    def from_args(cls, args: EngineArgs, *, in_process: bool = False, run_dir: Path | None = None) -> LLMEngine:
        """Loads the model, in a process of its own or in this one. `run_dir` holds the sockets."""
        tokenizer = Tokenizer.from_folder(args.model)
        if in_process:
            return cls(InprocClient(args), tokenizer)
        return cls(MPClient(args, run_dir or Path(tempfile.gettempdir())), tokenizer)

    @property
    def pooling(self) -> PoolingInfo | None:
        """What a model that pools can be asked for; None of one that generates."""
        return self._client.ready.pooling

    @property
    def num_unfinished(self) -> int:
        return self._outputs.num_unfinished

    def add_request(self, prompt: Prompt, params: SamplingParams, **fields: Unpack[RequestFields]) -> PreparedRequest:
        """Raises `InvalidRequest` before the engine hears of it. Loads `lora_request`, as `add_lora`, where it has a
        path."""
        request = self._inputs.process(prompt, params, **fields)
        lora = fields.get("lora_request")
        if lora is not None and lora.lora_path is not None:
            self.add_lora(lora)
        for add in self._outputs.add(request):
            self._client.add(add)
        return request

    def add_pooling_request(
        self, prompt: PoolingPrompt, params: PoolingParams, **fields: Unpack[RequestFields]
    ) -> PreparedRequest:
        """Raises `InvalidRequest` before the engine hears of it."""
        request = self._pooling_inputs.process(prompt, params, **fields)
        for add in self._outputs.add(request):
            self._client.add(add)
        return request

    def abort_request(self, request_id: str) -> list[RequestOutput]:
        """Ends every request that was named so; their last outputs."""
        return self._abort(self._outputs.internal_ids(request_id))

    def abort_all(self) -> list[RequestOutput]:
        return self._abort(self._outputs.internal_ids())

    def step(self) -> list[RequestOutput]:
        """Waits for the engine's next outputs. A request that it refused has `error` set in its last one."""
        message = self._client.get_outputs()
        processed = self._outputs.process(message.outputs, message.at)
        if processed.ids_to_abort:
            self._client.abort(processed.ids_to_abort)
        return processed.reports

    def add_lora(self, lora_request: LoRARequest) -> int:
        """Load an adapter, unless it is there from that folder already; its id. Raises `EngineError`."""
        return int(self.call("add_lora", lora_request.lora_name, lora_request.lora_path))

    def remove_lora(self, lora_name: str) -> int:
        """No request finds it from now on; how many that have it already go on to their end. Raises `EngineError`."""
        return int(self.call("remove_lora", lora_name))

    def list_loras(self) -> list[AdapterInfo]:
        return msgspec.convert(self.call("list_loras"), list[AdapterInfo])

    def call(self, method: str, *args: Any) -> Any:
        """A control call to the engine by name; raises `EngineError` for what goes wrong there."""
        return self._client.call(method, *args)

    def observe(self, observer: LatencyObserver | None) -> None:
        """From now on `observer` is told what latency histograms are made of; there is one at most."""
        self._outputs.meter = None if observer is None else LatencyMeter(observer)

    def shutdown(self) -> None:
        self._client.shutdown()

    def _abort(self, internal_ids: list[str]) -> list[RequestOutput]:
        processed = self._outputs.abort(internal_ids)
        self._client.abort(processed.ids_to_abort)
        return processed.reports
