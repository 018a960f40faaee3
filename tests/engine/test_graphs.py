"""The bookkeeping of captured steps, with a stand-in that launches again where a card would replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inferd.engine.attention.torch import TorchBackend
from inferd.engine.attention.triton import TritonBackend
from inferd.engine.config import EngineArgs
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup
from inferd.engine.core.output import GraphUse
from inferd.engine.loader.base import load_model
from inferd.engine.resolve import resolve
from inferd.engine.testing import decode_step as steps
from inferd.engine.testing.captured import Again, StaticTorch
from inferd.engine.testing.model_folder import make_model_folder
from inferd.engine.worker.buffers import MAX_SHARED_GROUPS, DecodeBuffers
from inferd.engine.worker.forward import EagerForward, KVMemory
from inferd.engine.worker.graphs import GraphForward, Key, Sizes, can_capture, capture_sizes, worthwhile
from inferd.engine.worker.inputs import StepLayout, empty_layout
from inferd.engine.worker.worker import allocate_kv_caches
from inferd.kernels.sampling.reference import greedy
from inferd.kernels.select import torch_ops

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
NUM_BLOCKS = 500


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[EagerForward, GraphForward, Again]:
    folder = make_model_folder(tmp_path_factory.mktemp("graphs") / "model")
    config = resolve(
        EngineArgs(str(folder), load_format="dummy", dtype="float32", device="cpu", max_model_len=MAX_MODEL_LEN)
    )
    ops = torch_ops("test")
    model = load_model(config, ops, CPU)
    specs = model.kv_specs(BLOCK_SIZE)
    plan = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(tuple(specs), next(iter(specs.values()))),))
    backend = StaticTorch(ops, min_saved_tokens=0)
    caches = allocate_kv_caches(plan, backend, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    generator = torch.Generator().manual_seed(0)
    for cache in caches.values():
        cache.normal_(generator=generator)
        cache[:, 0] = torch.nan  # the null block
    eager = EagerForward(model, backend, KVMemory(plan, caches), CPU)
    recorder = Again()
    graphs = GraphForward(eager, greedy, capture_sizes(12, share=True), MAX_MODEL_LEN, recorder, CPU)
    graphs.capture()
    return eager, graphs, recorder


def decode_step(seq_lens: list[int], **changes: Any) -> StepLayout:
    return steps.decode_step(seq_lens, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **changes)


@pytest.mark.parametrize("count", range(1, 13))
def test_a_replay_equals_the_eager_step(twins: tuple[EagerForward, GraphForward, Again], count: int) -> None:
    eager, graphs, recorder = twins
    step = decode_step([7 + 19 * row for row in range(count)])
    expected, actual = eager.run(step), graphs.run(step)
    assert expected is not None
    assert actual is not None
    assert recorder.replayed[-1] == min(size for size in (1, 2, 4, 8, 12) if size >= count)
    assert (actual.graph, expected.graph) == (GraphUse("decode", recorder.replayed[-1]), None)
    torch.testing.assert_close(actual.logits, expected.logits)
    assert actual.greedy_ids is not None
    assert torch.equal(actual.greedy_ids, expected.logits.argmax(dim=-1))


def test_shared_prefixes_are_replayed_and_forgotten(twins: tuple[EagerForward, GraphForward, Again]) -> None:
    """The second step shares less, the third nothing; what the first one left behind would show."""
    eager, graphs, _ = twins
    lens = [300, 310, 290, 301, 290, 300, 295, 333, 305, 305, 470]
    many, few = [(16, list(range(8))), (15, [8, 9])], [(16, [0, 2, 3, 9])]
    for shared in (many, few, []):
        step = decode_step(lens, shared=shared)
        expected, actual = eager.run(step), graphs.run(step)
        assert expected is not None
        assert actual is not None
        torch.testing.assert_close(actual.logits, expected.logits)


def test_rows_that_have_not_caught_up_give_no_logits(twins: tuple[EagerForward, GraphForward, Again]) -> None:
    eager, graphs, _ = twins
    step = decode_step([20, 40, 60, 80, 100], behind=(1, 3))
    expected, actual = eager.run(step), graphs.run(step)
    assert expected is not None
    assert actual is not None
    torch.testing.assert_close(actual.logits, expected.logits)
    assert graphs.run(decode_step([20, 30], behind=(0, 1))) is None


def test_other_steps_run_eagerly(twins: tuple[EagerForward, GraphForward, Again]) -> None:
    eager, graphs, recorder = twins
    before = len(recorder.replayed)
    single = decode_step([5])
    whole = StepLayout(
        query_lens=np.array([5]),
        seq_lens=np.array([5]),
        token_ids=np.arange(5),
        positions=np.arange(5),
        slots=(single.slots[0] - np.arange(5)[::-1],),
        block_tables=single.block_tables,
        shared_prefixes=[],
        logits_indices=np.array([4]),
        sampled_rows=np.array([0]),
    )
    for step in (whole, decode_step([9] * 13)):
        expected, actual = eager.run(step), graphs.run(step)
        assert expected is not None
        assert actual is not None
        torch.testing.assert_close(actual.logits, expected.logits)
    assert len(recorder.replayed) == before


def test_the_estimate_keeps_nothing(twins: tuple[EagerForward, GraphForward, Again]) -> None:
    eager, _, _ = twins
    recorder = Again()
    graphs = GraphForward(eager, greedy, capture_sizes(12, share=True), MAX_MODEL_LEN, recorder, CPU)
    assert graphs.estimate_bytes() == 100 * graphs.capture().num_graphs
    assert recorder.recorded == 4 + 9
    unused = GraphForward(eager, greedy, capture_sizes(12, share=False), MAX_MODEL_LEN, recorder, CPU)
    unused.run(decode_step([9]))
    assert not recorder.replayed


@pytest.mark.parametrize(
    ("max_num_seqs", "plain"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (5, (1, 2, 4, 5))],
)
def test_captured_sizes(max_num_seqs: int, plain: tuple[int, ...]) -> None:
    assert capture_sizes(max_num_seqs, share=False) == Sizes(plain, ())


def test_sizes_with_shared_prefixes_and_their_order() -> None:
    sizes = capture_sizes(100, share=True)
    assert sizes.shared == (2, 4, 8, 16, 32, 64, 96, 100)
    assert sizes.keys[:3] == [Key(100, True), Key(100, False), Key(96, True)]
    assert sizes.keys[-1] == Key(1, False)
    assert sizes.choose(17, shared=False) == Key(24, False)
    assert sizes.choose(17, shared=True) == Key(32, True)
    assert sizes.choose(101, shared=True) is None
    assert Sizes((1, 64), (2, 8)).choose(9, shared=True) == Key(64, False)
    assert capture_sizes(1, share=True).shared == ()


def test_prefixes_that_are_worth_it() -> None:
    pair = [0, 1]
    assert worthwhile([(255, pair), (256, pair), (128, [2, 3, 4])], 16) == [(4096, pair), (2048, [2, 3, 4])]
    many = [(300 + index, pair) for index in range(MAX_SHARED_GROUPS + 2)]
    assert [tokens for tokens, _ in worthwhile(many, 16)] == [
        16 * (300 + index) for index in range(MAX_SHARED_GROUPS + 1, 1, -1)
    ]


def test_inputs_of_all_sizes_lie_in_one_region() -> None:
    buffers = DecodeBuffers(12, [5, 3], CPU)
    small, large = buffers.inputs(1), buffers.inputs(12)
    assert small.token_ids.data_ptr() == large.token_ids.data_ptr()
    assert buffers.inputs(12).block_tables[1].data_ptr() == large.block_tables[1].data_ptr()
    assert [tuple(table.shape) for table in large.block_tables] == [(12, 5), (12, 3)]
    for tensor in (*large.block_tables, *large.slots, large.seq_lens, large.row_group):
        assert tensor.data_ptr() % 16 == large.token_ids.data_ptr() % 16


def test_a_smaller_step_leaves_nothing_of_a_larger_one() -> None:
    buffers = DecodeBuffers(12, [32], CPU)
    buffers.load(8, decode_step([300] * 8, shared=[(16, [0, 5, 6])]), [(256, [0, 5, 6])])
    inputs = buffers.inputs(8)
    assert inputs.prefix_lens.tolist()[:2] == [256, 0]
    assert inputs.prefix_starts.tolist() == [0] + [3] * MAX_SHARED_GROUPS
    assert inputs.prefix_rows.tolist()[:3] == [0, 5, 6]
    assert inputs.row_group.tolist() == [0, -1, -1, -1, -1, 0, 0, -1]
    step = decode_step([33, 18])
    buffers.load(8, step, [])
    assert inputs.seq_lens.tolist() == [33, 18] + [0] * 6
    assert inputs.slots[0].tolist() == [*step.slots[0].tolist(), *[-1] * 6]
    assert inputs.token_ids.tolist() == [*step.token_ids.tolist(), *[0] * 6]
    assert inputs.positions.tolist() == [32, 17] + [0] * 6
    assert inputs.block_tables[0][:2, :3].tolist() == step.block_tables[0].tolist()
    assert inputs.row_group.tolist() == [-1] * 8
    assert not inputs.prefix_lens.any()
    buffers.load(8, empty_layout(1), [])
    assert not inputs.seq_lens.any()
    assert (inputs.slots[0] == -1).all()


def test_backends_say_whether_they_can_be_captured() -> None:
    ops = torch_ops("test")
    assert can_capture(TritonBackend(ops))
    assert not can_capture(TorchBackend(ops))
