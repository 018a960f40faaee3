"""Adapters through every front door: the three clients behave alike, and `LLM` and `AsyncLLM` load what they are given.

On an executor without a model, whose answers depend on what the adapter's files hold.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine import LLM, AsyncLLM, LoRARequest
from inferd.engine.config import EngineArgs
from inferd.engine.core.client import AsyncMPClient, EngineCoreClient, InprocClient, MPClient
from inferd.engine.errors import EngineError, InvalidRequest
from inferd.engine.messages import AddRequest, EngineOutput, EngineOutputs, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.testing.model_folder import make_model_folder

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def run_dir() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., str]:
    def make(name: str, **config: Any) -> str:
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4} | config
        (folder / "adapter_config.json").write_text(str(fields).replace("'", '"'))
        (folder / "adapter_model.safetensors").write_text(name)
        return str(folder)

    return make


@pytest.fixture
def args(tmp_path: Path) -> EngineArgs:
    folder = make_model_folder(tmp_path / "model")
    fixed: dict[str, Any] = dict(executor="scripted", device="cpu", block_size=4, max_model_len=64)
    return EngineArgs(str(folder), enable_lora=True, max_loras=2, **fixed)


class FromOrdinaryCode:
    """`AsyncMPClient` driven from a test without a loop."""

    def __init__(self, args: EngineArgs, run_dir: Path) -> None:
        self.runner = asyncio.Runner()
        self._client = self.runner.run(AsyncMPClient.start(args, run_dir))

    def add(self, request: AddRequest) -> None:
        self.runner.run(self._client.add(request))

    def call(self, method: str, *args: Any) -> Any:
        return self.runner.run(self._client.call(method, *args))

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        return self.runner.run(self._client.get_outputs())

    def shutdown(self) -> None:
        self.runner.run(self._client.shutdown())
        self.runner.close()


@pytest.fixture(params=["in-process", "process", "process-async"])
def client(request: pytest.FixtureRequest, args: EngineArgs, run_dir: Path) -> Iterator[EngineCoreClient]:
    made: Any
    if request.param == "in-process":
        made = InprocClient(args)
    elif request.param == "process":
        made = MPClient(args, run_dir)
    else:
        made = FromOrdinaryCode(replace(args, async_scheduling=True), run_dir)
    yield made
    made.shutdown()


def ask(client: EngineCoreClient, *requests: tuple[str, str | None]) -> dict[str, EngineOutput]:
    """The last output of each of these requests, with all its tokens."""
    for request_id, lora in requests:
        client.add(AddRequest(request_id, list(b"hello"), PARAMS, 0.0, lora=lora))
    done: dict[str, EngineOutput] = {}
    tokens: dict[str, list[int]] = {}
    while len(done) < len(requests):
        for output in client.get_outputs(30.0).outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                done[output.request_id] = output
                output.new_token_ids = tokens[output.request_id]
    return done


def names(client: EngineCoreClient) -> list[str]:
    return [info["name"] if isinstance(info, dict) else info.name for info in client.call("list_loras")]


def test_adapters_are_loaded_named_and_removed(client: EngineCoreClient, make_adapter: Callable[..., str]) -> None:
    one, two = make_adapter("one"), make_adapter("two")
    assert client.call("add_lora", "one", one) == 1
    assert client.call("add_lora", "two", two) == 2
    assert client.call("add_lora", "one", one) == 1
    assert names(client) == ["one", "two"]
    done = ask(client, ("1", "one"), ("2", "two"), ("3", None), ("4", "one"), ("5", "three"))
    answers = {request_id: tuple(output.new_token_ids) for request_id, output in done.items()}
    assert answers["1"] == answers["4"]
    assert len({answers["1"], answers["2"], answers["3"]}) == 3
    assert done["5"].finish_reason is FinishReason.ERROR
    assert done["5"].error == "unknown adapter 'three'; loaded: one, two"
    assert done["5"].error_param == "lora"
    assert client.call("remove_lora", "one") == 0
    assert names(client) == ["two"]
    assert ask(client, ("6", "one"))["6"].error == "unknown adapter 'one'; loaded: two"


def test_what_is_wrong_with_an_adapter_is_said_where_it_is_loaded(
    client: EngineCoreClient, make_adapter: Callable[..., str], tmp_path: Path
) -> None:
    for path, message in (
        (str(tmp_path), "LoadError: .* is not an adapter folder"),
        (make_adapter("large", r=100), "NotSupported: .*rank 100 is above max_lora_rank=16"),
        (make_adapter("dora", use_dora=1), "NotSupported: .*use_dora=1 is not supported"),
    ):
        with pytest.raises(EngineError, match=message):
            client.call("add_lora", "x", path)
    with pytest.raises(EngineError, match="InvalidRequest: unknown adapter 'x'; loaded: none"):
        client.call("remove_lora", "x")
    assert ask(client, ("1", None))["1"].finish_reason is FinishReason.LENGTH


def test_an_engine_without_adapters_says_how_to_have_them(args: EngineArgs, make_adapter: Callable[..., str]) -> None:
    client = InprocClient(replace(args, enable_lora=False))
    for method, arguments in (("add_lora", ["x", make_adapter("x")]), ("list_loras", []), ("remove_lora", ["x"])):
        with pytest.raises(EngineError, match="this engine has no adapters; start it with enable_lora"):
            client.call(method, *arguments)
    output = ask(client, ("1", "x"))["1"]
    assert (output.finish_reason, output.error_param) == (FinishReason.ERROR, "lora")
    assert "start it with enable_lora" in (output.error or "")


def test_llm_loads_the_adapters_it_is_given(args: EngineArgs, make_adapter: Callable[..., str]) -> None:
    one, two = LoRARequest("one", make_adapter("one")), LoRARequest("two", make_adapter("two"))
    options = {
        name: getattr(args, name) for name in ("executor", "device", "max_model_len", "enable_lora", "max_loras")
    }
    with LLM(args.model, in_process=True, **options) as llm:
        prompts = ["hello"] * 4

        def answers(lora: Any) -> list[list[int]]:
            outputs = llm.generate(prompts, PARAMS, lora_request=lora, progress=False)
            return [output.outputs[0].token_ids for output in outputs]

        by_one, by_two, by_none, again = answers([one, two, None, LoRARequest("one")])
        assert by_one == again
        assert len({tuple(by_one), tuple(by_two), tuple(by_none)}) == 3
        assert answers(two) == [by_two] * 4
        assert [(info.name, info.num_requests) for info in llm.list_loras()] == [("one", 0), ("two", 0)]
        assert llm.remove_lora("two") == 0
        with pytest.raises(InvalidRequest, match="unknown adapter 'two'"):
            answers(LoRARequest("two"))
        assert answers(two) == [by_two] * 4
        assert llm.add_lora(one) == 1
        with pytest.raises(InvalidRequest, match="4 prompts but 2 adapters") as caught:
            answers([one, two])
        assert caught.value.param == "lora_request"
        with pytest.raises(EngineError, match="not an adapter folder"):
            answers(LoRARequest("three", "/nowhere"))


async def test_async_llm_loads_the_adapters_it_is_given(
    args: EngineArgs, run_dir: Path, make_adapter: Callable[..., str]
) -> None:
    one = LoRARequest("one", make_adapter("one"))
    llm = await AsyncLLM.start(args, run_dir)
    try:

        async def answer(**fields: Any) -> list[int]:
            async for output in llm.generate("hello", PARAMS, **fields):
                if output.finished:
                    return output.outputs[0].token_ids
            raise AssertionError("it did not end")

        plain, first, second = await asyncio.gather(answer(), answer(lora_request=one), answer(lora_request=one))
        assert first == second != plain
        assert await answer(lora_request=LoRARequest("one")) == first
        prepared = llm.prepare("hello", PARAMS, lora_request=LoRARequest("one"))
        assert [output.outputs[0].token_ids async for output in llm.generate(prepared)][-1] == first
        assert [info.name for info in await llm.list_loras()] == ["one"]
        assert await llm.remove_lora("one") == 0
        with pytest.raises(InvalidRequest, match="unknown adapter 'one'; loaded: none"):
            await answer(lora_request=LoRARequest("one"))
        assert await llm.add_lora(one) == 2
    finally:
        await llm.shutdown()
