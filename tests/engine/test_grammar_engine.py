"""Structured output in a whole engine: a model with random weights writes what is asked for, and nothing else."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from inferd.engine import LLM, SamplingParams
from inferd.engine.config import EngineArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.errors import InvalidRequest, NotSupported
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.engine.grammar.llguidance import LLGuidanceBackend
from inferd.engine.grammar.manager import GrammarManager
from inferd.engine.grammar.scheduling import StructuredRequests
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.grammar.vocabulary import read_vocabulary
from inferd.engine.messages import AddRequest, EngineOutput, FinishReason
from inferd.engine.resolve import resolve
from inferd.engine.testing.grammar import InlineCompiler
from inferd.engine.testing.jobs import Job, run_jobs
from inferd.engine.testing.model_folder import IM_END_ID, IM_START_ID, make_model_folder

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 4}
BLANKS = {ord(character): -100.0 for character in " \t\r\n"}  # else a random model writes little but blanks
NUM_SEEDS = 200
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": ["null", "boolean"]}, "minItems": 1, "maxItems": 3},
    {
        "anyOf": [
            {"type": "boolean"},
            {"type": "object", "properties": {"n": {"type": "null"}}, "required": ["n"], "additionalProperties": False},
        ]
    },
    {"type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 2, "$defs": {"it": {"const": "é"}}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("grammar") / "model", config=SMALL)


def write_json(folder: Path, backend: str, num_seeds: int, **params: Any) -> list[tuple[str, dict[str, Any]]]:
    """Completed outputs, each with its schema."""
    schemas = [schema for schema in SCHEMAS if backend != "lm-format-enforcer" or "$ref" not in str(schema)]
    asked = [schemas[seed % len(schemas)] for seed in range(num_seeds)]
    all_params = [
        SamplingParams(
            temperature=1.5, seed=seed, structured_output=StructuredOutput(json_schema=json.dumps(schema)), **params
        )
        for seed, schema in enumerate(asked)
    ]
    engine = dict(load_format="dummy", device="cpu", dtype="float32", max_num_seqs=64, max_model_len=400, num_threads=1)
    with LLM(folder, in_process=True, grammar_backend=backend, **engine) as llm:
        outputs = llm.generate([f"{seed}" for seed in range(num_seeds)], all_params, progress=False)
    ended = [(output.outputs[0], schema) for output, schema in zip(outputs, asked, strict=True)]
    return [(output.text, schema) for output, schema in ended if output.finish_reason is FinishReason.STOP]


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "outlines", "lm-format-enforcer"])
def test_every_completed_output_is_valid(folder: Path, backend: str) -> None:
    written = write_json(folder, backend, NUM_SEEDS, max_tokens=40, logit_bias=BLANKS)
    assert len(written) >= NUM_SEEDS * 0.9
    for text, schema in written:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "outlines", "lm-format-enforcer"])
def test_every_completed_output_is_valid_with_blanks(folder: Path, backend: str) -> None:
    written = write_json(folder, backend, NUM_SEEDS, max_tokens=300)
    assert len(written) >= NUM_SEEDS * 0.8
    for text, schema in written:
        jsonschema.validate(json.loads(text), schema)


def test_what_cannot_be_enforced_names_the_keyword(folder: Path) -> None:
    engine = dict(load_format="dummy", device="cpu", dtype="float32", max_model_len=64, num_threads=1)
    unique = {"type": "array", "items": {"type": "null"}, "uniqueItems": True}
    with LLM(folder, in_process=True, **engine) as llm:
        for spec, name in ((dict(json_schema=unique), "uniqueItems"), (dict(regex="(a"), "regex")):
            with pytest.raises(InvalidRequest, match=name) as raised:
                llm.generate("x", SamplingParams(structured_output=StructuredOutput(**spec)), progress=False)
            assert raised.value.param == "structured_output"
        # The default cannot hold a text to a length, so this goes to the next one.
        length = {"type": "string", "minLength": 3, "maxLength": 3}
        params = SamplingParams(structured_output=StructuredOutput(json_schema=length), max_tokens=30)
        (output,) = llm.generate("x", params, progress=False)
        assert len(json.loads(output.outputs[0].text)) == 3


# Below, grammars are compiled in the engine's own process.

MakeEngine = Callable[..., tuple[EngineCore, InlineCompiler]]


@pytest.fixture(scope="module")
def make_engine(folder: Path) -> Iterator[MakeEngine]:
    cores = []

    def make(**changes: Any) -> tuple[EngineCore, InlineCompiler]:
        options: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_threads=1, block_size=4)
        options |= dict(load_format="dummy", max_num_seqs=16, max_model_len=96, num_blocks=300) | changes
        config = resolve(EngineArgs(str(folder), **options))
        model = config.model
        compiler = InlineCompiler(LLGuidanceBackend(read_vocabulary(folder, model.vocab_size, model.eos_token_ids)))
        manager = GrammarManager(compiler, model.vocab_size, model.eos_token_ids, cache_bytes=1 << 24)
        executor = UniProcExecutor(config)
        cores.append(core := EngineCore(config, executor, grammar=StructuredRequests(manager, ["llguidance"])))
        return core, compiler

    yield make
    for core in cores:
        core.shutdown()


def text_of(token_ids: list[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")


def drive(core: EngineCore, num_steps: int = 400) -> dict[str, list[EngineOutput]]:
    """Outputs by request, until nothing is left."""
    found: dict[str, list[EngineOutput]] = {}
    for _ in range(num_steps):
        if not core.has_work:
            return found
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not come to an end")


def ask(
    request_id: str, prompt: list[int] | None = None, *, form: dict[str, Any] | None = None, **params: Any
) -> AddRequest:
    spec = None if form is None else StructuredOutput(**form)
    return AddRequest(request_id, prompt or [65], SamplingParams(structured_output=spec, **params), 0.0)


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


REGEX = "(ab|cd)+[0-9]{2}!"


def workload() -> list[Job]:
    """Under grammars and free, greedy and seeded, of several lengths; half join while others run."""
    rng = random.Random(3)
    jobs = []
    forms: list[dict[str, Any] | None] = [
        dict(regex=REGEX),
        None,
        dict(json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6}),
        dict(choice=["yes, of course", "no"]),
        dict(grammar='start: "(" start ")" | "x"'),
    ]
    for index in range(15):
        form = forms[index % len(forms)]
        sampling: dict[str, Any] = dict(temperature=1.2, seed=index) if index % 2 else dict(temperature=0.0)
        params = SamplingParams(
            structured_output=None if form is None else StructuredOutput(**form),
            max_tokens=rng.choice([12, 20]),
            logit_bias=BLANKS,
            **sampling,
        )
        prompt = tuple(rng.randrange(256) for _ in range(rng.choice([1, 6, 17])))
        jobs.append(Job(f"job-{index}", prompt, params, joins_at_step=0 if index < 8 else 2 * (index - 8)))
    return jobs


@pytest.fixture(scope="module")
def answers(make_engine: MakeEngine) -> dict[str, list[int]]:
    """What each job answers alone."""
    core, _ = make_engine(max_num_seqs=1, async_scheduling=False)
    return {
        job.request_id: run_jobs(core, [replace(job, joins_at_step=0)]).tokens[job.request_id] for job in workload()
    }


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "options",
    [dict(), dict(num_blocks=26), dict(max_num_batched_tokens=3), dict(enable_prefix_caching=False)],
    ids=["ample", "tight", "chunks", "uncached"],
)
def test_outputs_do_not_depend_on_scheduling(
    make_engine: MakeEngine, answers: dict[str, list[int]], options: dict[str, Any], is_async: bool
) -> None:
    core, _ = make_engine(async_scheduling=is_async, **options)
    result = run_jobs(core, workload())
    assert result.tokens == answers
    assert (result.stats.preemptions > 0) == ("num_blocks" in options)
    for job in workload():
        spec = job.params.structured_output
        if spec is not None and result.reasons[job.request_id] is FinishReason.STOP and spec.regex is not None:
            assert re.fullmatch(REGEX, text_of(result.tokens[job.request_id]))


def test_a_grammar_that_is_compiled_holds_nobody_up(make_engine: MakeEngine) -> None:
    core, compiler = make_engine()
    compiler.allowed.clear()
    core.add(ask("waits", form=dict(regex="ab"), max_tokens=9))
    core.add(ask("free", max_tokens=3, ignore_eos=True))
    seen: list[EngineOutput] = []
    while not any(output.finish_reason for output in seen):
        seen += core.step().outputs
    assert {output.request_id for output in seen} == {"free"}
    assert [core.step().outputs for _ in range(2)] == [[], []]
    assert core.is_held
    compiler.allowed.set()
    while core.has_work:
        seen += core.step().outputs
    assert text_of(tokens_of([output for output in seen if output.request_id == "waits"])) == "ab"


def test_a_grammar_that_fails_ends_its_request_alone(make_engine: MakeEngine) -> None:
    core, _ = make_engine()
    core.add(ask("broken", form=dict(regex="(a"), max_tokens=5))
    core.add(ask("fine", form=dict(choice=["yes"]), max_tokens=5))
    found = drive(core, 100_000)
    assert found["broken"][-1].finish_reason is FinishReason.ERROR
    assert "regex" in str(found["broken"][-1].error)
    assert found["broken"][-1].error_param == "structured_output"
    assert text_of(tokens_of(found["fine"])) == "yes"


def test_what_is_beyond_every_backend_is_refused_at_once(make_engine: MakeEngine) -> None:
    core, compiler = make_engine()
    with pytest.raises(NotSupported, match="minProperties"):
        core.add(ask("a", form=dict(json_schema={"type": "object", "minProperties": 2})))
    assert compiler.num_compiled == 0


def test_a_token_that_is_refused_ends_its_request_alone(make_engine: MakeEngine) -> None:
    core, _ = make_engine(async_scheduling=False)
    executor: Any = core._executor
    sample = executor.worker.runner.sampler
    executor.worker.runner.sampler = lambda logits, batch: torch.full_like(sample(logits, batch), ord("z"))
    core.add(ask("held", form=dict(regex="[a-y]+"), max_tokens=4))
    core.add(ask("free", max_tokens=4))
    found = drive(core, 100_000)
    assert found["held"][-1].finish_reason is FinishReason.ERROR
    assert found["held"][-1].error_param is None
    assert tokens_of(found["held"]) == []
    assert "122" in str(found["held"][-1].error)
    assert tokens_of(found["free"]) == [ord("z")] * 4


def test_the_end_of_a_grammar_ends_the_output(make_engine: MakeEngine) -> None:
    core, _ = make_engine()
    core.add(ask("a", form=dict(regex="ab"), ignore_eos=True, min_tokens=9, max_tokens=20))
    (output,) = [output for output in drive(core, 100_000)["a"] if output.finish_reason is not None]
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("seed", range(5))
def test_min_tokens_where_the_grammar_goes_on(make_engine: MakeEngine, seed: int) -> None:
    core, _ = make_engine()
    core.add(ask("a", form=dict(regex="[ab]+"), min_tokens=12, max_tokens=40, seed=seed, logit_bias={IM_END_ID: 100.0}))
    found = drive(core, 100_000)["a"]
    assert len(tokens_of(found)) == 13  # twelve, and the end that the bias asks for
    assert found[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("prompt", [[65], [65, IM_START_ID]], ids=["may open", "is open"])
def test_reasoning_comes_first(make_engine: MakeEngine, prompt: list[int]) -> None:
    """The markers are two ids of the model; the bias brings them, and would bring an end everywhere."""
    close = ord("}")
    form = dict(regex="ab", reasoning=(IM_START_ID, close))
    bias = {IM_START_ID: 12.0, close: 12.0, IM_END_ID: 12.0}
    core, _ = make_engine()
    for seed in range(4):
        core.add(ask(f"{seed}", prompt, form=form, logit_bias=bias, temperature=1.5, seed=seed, max_tokens=90))
    for outputs in drive(core, 100_000).values():
        token_ids = tokens_of(outputs)
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert token_ids[-4:] == [close, ord("a"), ord("b"), IM_END_ID]
        assert close not in token_ids[:-4]
        assert prompt[-1] == IM_START_ID or token_ids[0] == IM_START_ID


def test_an_abort_while_compiling_leaves_nothing(make_engine: MakeEngine) -> None:
    core, compiler = make_engine()
    compiler.allowed.clear()
    core.add(ask("first", form=dict(regex="a")))
    core.add(ask("second", form=dict(regex="b")))
    core.step()
    assert {output.finish_reason for output in core.abort(["first", "second"])} == {FinishReason.ABORT}
    compiler.allowed.set()
    core.add(ask("third", form=dict(regex="c"), max_tokens=3))
    assert text_of(tokens_of(drive(core, 100_000)["third"])) == "c"
    assert compiler.num_compiled <= 2  # what had begun, and the third
