"""The engine for ordinary code: add requests, then step until nothing is left."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Unpack

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import EngineCoreClient, InprocClient, MPClient
from inferd.engine.frontend.inputs import InputProcessor, PreparedRequest, Prompt, RequestFields
from inferd.engine.frontend.outputs import RequestOutput
from inferd.engine.frontend.processor import OutputProcessor
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.params import SamplingParams


class LLMEngine:
    """Text in and text out over one `EngineCoreClient`, which it owns. Used by one thread."""

    def __init__(self, client: EngineCoreClient, tokenizer: Tokenizer | None) -> None:
        ready = client.ready
        self.tokenizer = tokenizer
        self._client = client
        self._inputs = InputProcessor(tokenizer, max_model_len=ready.max_model_len, vocab_size=ready.vocab_size)
        self._outputs = OutputProcessor(tokenizer)

    @classmethod
    def from_args(cls, args: EngineArgs, *, in_process: bool = False, run_dir: Path | None = None) -> LLMEngine:
        """Loads the model, in a process of its own or in this one. `run_dir` holds the sockets."""
        tokenizer = Tokenizer.from_folder(args.model)
        if in_process:
            return cls(InprocClient(args), tokenizer)
        return cls(MPClient(args, run_dir or Path(tempfile.gettempdir())), tokenizer)

    @property
    def num_unfinished(self) -> int:
        return self._outputs.num_unfinished

    def add_request(self, prompt: Prompt, params: SamplingParams, **fields: Unpack[RequestFields]) -> PreparedRequest:
        """Raises `InvalidRequest` before the engine hears of it."""
        request = self._inputs.process(prompt, params, **fields)
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
        processed = self._outputs.process(self._client.get_outputs().outputs)
        if processed.ids_to_abort:
            self._client.abort(processed.ids_to_abort)
        return processed.reports

    def call(self, method: str, *args: Any) -> Any:
        """A control call to the engine by name; raises `EngineError` for what goes wrong there."""
        return self._client.call(method, *args)

    def shutdown(self) -> None:
        self._client.shutdown()

    def _abort(self, internal_ids: list[str]) -> list[RequestOutput]:
        processed = self._outputs.abort(internal_ids)
        self._client.abort(processed.ids_to_abort)
        return processed.reports
