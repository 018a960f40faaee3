"""How far the served precision is from float32, on the served path.

Both engines are made to write the same text (what float32 samples), so that their logits can be compared position by
position: prefill, batched decode, prefix sharing and whatever kernels are in use, as they are served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inferd.engine.build import make_executor
from inferd.engine.config import EngineArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.engine.messages import AddRequest
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.sampling.batch import SamplingBatch
from inferd.engine.sampling.sampler import Sampler
from inferd.engine.worker.runner import ModelRunner

NUM_TEXTS = 20
TOKENS_PER_TEXT = 100


@dataclass(frozen=True)
class Quality:
    tokens: int
    mean_kl: float  # nats, of the served distribution from float32's
    top1_agreement: float  # share of positions with the same most likely token


class Author:
    """Samples as always, and keeps the logits and tokens of each text."""

    def __init__(self) -> None:
        self.logits: dict[str, list[Tensor]] = {}
        self.token_ids: dict[str, list[int]] = {}
        self._sampler = Sampler()

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        kept = logits.float().clone()  # the sampler may overwrite what it is given
        token_ids = self._sampler(logits, batch)
        for request_id, row, token_id in zip(batch.request_ids, kept, token_ids.tolist(), strict=True):
            self.logits.setdefault(request_id, []).append(row)
            self.token_ids.setdefault(request_id, []).append(token_id)
        return token_ids


class Follower:
    """Writes what the author wrote, and measures what it would have written."""

    def __init__(self, author: Author) -> None:
        self._author = author
        self._written = dict.fromkeys(author.token_ids, 0)
        self._kl = 0.0
        self._agreed = 0

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        forced = []
        for request_id, row in zip(batch.request_ids, logits.float(), strict=True):
            position = self._written[request_id]
            self._compare(self._author.logits[request_id][position], row)
            forced.append(self._author.token_ids[request_id][position])
            self._written[request_id] = position + 1
        return torch.tensor(forced)

    def _compare(self, reference: Tensor, row: Tensor) -> None:
        log_p, log_q = reference.double().log_softmax(-1), row.double().log_softmax(-1)
        self._kl += float((log_p.exp() * (log_p - log_q)).sum())
        self._agreed += int(reference.argmax() == row.argmax())

    @property
    def quality(self) -> Quality:
        tokens = sum(self._written.values())
        return Quality(tokens, self._kl / tokens, self._agreed / tokens)


def measure_quality(args: EngineArgs, prompts: list[list[int]]) -> Quality:
    """Mean KL and top-1 agreement of `args` with float32 over `NUM_TEXTS` texts that start with `prompts` in turn."""
    author = Author()
    _write(replace(args, dtype="float32", kernels="torch"), author, prompts)
    follower = Follower(author)
    _write(args, follower, prompts)
    return follower.quality


def _write(args: EngineArgs, sampler: Author | Follower, prompts: list[list[int]]) -> None:
    executor = make_executor(resolve(args))
    assert isinstance(executor, UniProcExecutor)
    core = EngineCore(resolve(args), executor)
    runner = executor.worker.runner
    assert isinstance(runner, ModelRunner)
    runner.sampler = sampler
    for index in range(NUM_TEXTS):
        params = SamplingParams(max_tokens=TOKENS_PER_TEXT, ignore_eos=True, seed=index)
        core.add(AddRequest(f"text-{index}", prompts[index % len(prompts)], params, arrival_time_s=0.0))
    while core.has_work:
        core.step()
    core.shutdown()
