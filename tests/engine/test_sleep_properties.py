"""Random orders of requests, steps, sleeps and wakes: no token is lost or wrong, and no step runs without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.engine.core.sleep_states import SleepState
from inferd.engine.core.step import EngineCore
from inferd.engine.errors import EngineAsleep
from inferd.engine.messages import AddRequest, Call, CallReply, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.testing.fake_executor import FakeExecutor, scrambled

VOCAB = 13
NEXT_TOKEN = scrambled(VOCAB)

IDS = st.integers(0, 9).map("r{}".format)
ADD = st.tuples(st.just("add"), st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12), st.integers(1, 8))
STEPS = st.tuples(st.just("steps"), st.integers(0, 8))
SLEEP = st.tuples(
    st.just("sleep"),
    st.sampled_from([1, 2]),
    st.sampled_from(["wait", "keep", "abort", "refuse"]),
    st.sampled_from(["hold", "refuse"]),
)
WAKE = st.tuples(st.just("wake"), st.sampled_from([None, ["weights"], ["kv_cache"], ["kv_cache", "weights"], []]))
ACTION = st.one_of(
    ADD,
    STEPS,
    SLEEP,
    WAKE,
    st.tuples(st.just("abort"), IDS),
    st.tuples(st.just("pause"), st.sampled_from(["wait", "keep", "abort"])),
    st.tuples(st.just("resume")),
    st.tuples(st.sampled_from(["pause_request", "resume_request"]), IDS),
)
NIGHT = st.tuples(ADD, ADD, STEPS, SLEEP, STEPS, ACTION, ACTION, WAKE, STEPS, WAKE)
"""Most sleeps find something that runs, and most nights end."""

SCRIPT = st.lists(st.one_of(NIGHT, NIGHT, ACTION.map(lambda action: (action,))), max_size=8).map(
    lambda phrases: [action for phrase in phrases for action in phrase]
)


class Session:
    """Does what it is told, and knows what each request must be told in the end."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.replies: dict[int, CallReply] = {}
        self.num_calls = 0

    @property
    def state(self) -> SleepState:
        return self.core.sleeper.state

    def do(self, name: str, *args: Any) -> None:
        if name == "add":
            self._add(*args)
        elif name == "abort":
            self._take(self.core.abort(args))
        elif name == "steps":
            for _ in range(args[0]):
                self.step()
        else:
            self.ask(name, *args)

    def ask(self, method: str, *args: Any) -> None:
        self.num_calls += 1
        reply = self.core.call(Call(self.num_calls, method, list(args)))
        if reply is not None:
            self.replies[reply.call_id] = reply
        assert self.core.sleeper.is_sleeping() == (self.state not in (SleepState.AWAKE, SleepState.DRAINING))

    def step(self) -> None:
        """As the engine's loop does: only when there is something to be done."""
        if not self.core.has_work:
            return
        said = self.core.step()
        self._take(said.outputs)
        if said.reply is not None:
            self.replies[said.reply.call_id] = said.reply

    def finish(self) -> None:
        """Whatever state it is in."""
        self.ask("wake")
        assert self.state is SleepState.AWAKE
        self.ask("resume")
        for request_id in self.prompts:
            self.ask("resume_request", request_id)
        for _ in range(2000):
            self.step()
        assert not self.core.has_work

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        request_id = f"r{len(self.prompts)}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        try:
            self.core.add(AddRequest(request_id, prompt, params, 0.0))
        except EngineAsleep:
            assert self.state is not SleepState.AWAKE
            return
        self.prompts[request_id], self.tokens[request_id] = (prompt, max_tokens), []

    def _take(self, outputs: list[Any]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(NEXT_TOKEN(token_ids))
    return token_ids[len(prompt) :]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=SCRIPT,
    ahead=st.booleans(),
    num_blocks=st.sampled_from([7, 40]),
    windows=st.sampled_from([(None,), (None, 8)]),
)
def test_every_request_gets_its_own_answer_however_often_the_engine_sleeps(
    make_core_config: Callable[..., Any],
    actions: list[tuple[Any, ...]],
    ahead: bool,
    num_blocks: int,
    windows: tuple[int | None, ...],
) -> None:
    blocks = num_blocks * len(windows)
    config = make_core_config(
        async_scheduling=ahead, num_blocks=blocks, vocab_size=VOCAB, max_model_len=24, budget=16, max_num_seqs=4
    )
    session = Session(EngineCore(config, FakeExecutor(windows=windows, next_token=NEXT_TOKEN)))
    for action in actions:
        session.do(*action)
    session.finish()
    assert session.reasons.keys() == session.prompts.keys()
    for request_id, (prompt, max_tokens) in session.prompts.items():
        whole, said = alone(prompt, max_tokens), session.tokens[request_id]
        if session.reasons[request_id] is FinishReason.ABORT:
            assert said == whole[: len(said)]
        else:
            assert said == whole
    assert session.replies.keys() == set(range(1, session.num_calls + 1))
    errors = [reply.error for reply in session.replies.values() if reply.error is not None]
    assert all("SleepRefused" in error for error in errors), errors
    stats = session.core.stats()
    assert (stats.blocks_free, stats.running, stats.waiting) == (stats.blocks_total, 0, 0)
