"""Offline batches: outputs in the order of the prompts, and one bad prompt leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import InprocClient
from inferd.engine.errors import ConfigError, EngineDeadError, InvalidRequest, RequestFailed
from inferd.engine.frontend.inputs import TokensPrompt
from inferd.engine.frontend.llm import LLM
from inferd.engine.frontend.llm_engine import LLMEngine
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import FinishReason
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.model_folder import make_model_folder

MakeLLM = Callable[..., LLM]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model", replies={"capital": "Paris.", "list": "1\n2\n3\n4"})


@pytest.fixture(params=[True, False], ids=["in-process", "process"])
def make_llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(**args: Any) -> LLM:
        options = {"executor": "scripted", "device": "cpu", "block_size": 4, "max_model_len": 256} | args
        run_dir = Path(os.environ["XDG_RUNTIME_DIR"])
        made.append(LLM(folder, in_process=request.param, run_dir=run_dir, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def test_outputs_come_in_the_order_of_the_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=8)
    prompts = [f"prompt {number} " * (1 + number % 5) for number in range(50)]
    params = [SamplingParams(max_tokens=1 + (number * 7) % 20) for number in range(50)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.num_output_tokens for output in outputs] == [own.max_tokens for own in params]
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts[:10], params[:10], strict=True)]
    assert [output.outputs[0].text for output in alone] == [output.outputs[0].text for output in outputs[:10]]


def test_one_prompt_may_be_text_or_ids(make_llm: MakeLLM) -> None:
    llm = make_llm()
    given = ["capital", list(b"capital"), TokensPrompt(list(b"capital")), ["capital"]]
    assert [[o.outputs[0].text for o in llm.generate(prompt)] for prompt in given] == [["Paris."]] * 4
    assert llm.generate([]) == []


def test_one_bad_prompt_leaves_nothing_behind(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate(["good", "", "good"])
    with pytest.raises(InvalidRequest, match="2 prompts but 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert llm.generate("capital")[0].outputs[0].text == "Paris."


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        (["good", "", "good"], InvalidRequest),
        (["good", [1, 10**6]], InvalidRequest),
        (["good", "broken"], RequestFailed),
    ],
)
def test_a_bad_prompt_aborts_the_others_in_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[Any], error: type[Exception]
) -> None:
    folder = make_model_folder(tmp_path / "breaking", breaks="broken")
    client = InprocClient(EngineArgs(model=str(folder), executor="scripted", device="cpu"))
    engine = LLMEngine(client, Tokenizer.from_folder(folder))
    monkeypatch.setattr(LLMEngine, "from_args", lambda *args, **options: engine)
    with pytest.raises(error):
        LLM(folder).generate(prompts, SamplingParams(max_tokens=100))
    stats = client.call("stats")
    assert (stats["running"], stats["waiting"], stats["blocks_free"]) == (0, 0, stats["blocks_total"])
    assert engine.num_unfinished == 0


def test_stop_strings_work_offline(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate("list", SamplingParams(stop="3", max_tokens=50))
    assert output.outputs[0].text == "1\n2\n"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (FinishReason.STOP, "3")


def test_a_lowered_max_tokens_is_logged(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    (output,) = make_llm().generate("x" * 250, SamplingParams(max_tokens=100))
    assert output.num_output_tokens == 6
    assert "max_tokens lowered from 100 to 6" in caplog.text


def test_it_is_a_context_manager(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        assert llm.generate("capital")[0].outputs[0].text == "Paris."
    with pytest.raises(EngineDeadError):
        llm.generate("capital")


def test_a_wrong_option_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(folder, in_process=True, executor="scripted", device="cpu", max_num_seqs=0)


def test_the_engine_steps_by_hand(folder: Path) -> None:
    engine = LLMEngine.from_args(EngineArgs(model=str(folder), executor="scripted", device="cpu"), in_process=True)
    params = SamplingParams(output_kind=OutputKind.DELTA, max_tokens=30)
    for name in ("one", "two", "two"):
        engine.add_request("capital", params, request_id=name)
    seen: dict[str, str] = {}
    engine.step()
    aborted = engine.abort_request("two")
    assert [output.outputs[0].finish_reason for output in aborted] == [FinishReason.ABORT] * 2
    while engine.num_unfinished:
        for output in engine.step():
            seen[output.request_id] = seen.get(output.request_id, "") + output.outputs[0].text
    assert seen == {"one": "aris."}
    engine.shutdown()
