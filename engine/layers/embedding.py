"""From token ids to hidden states and back to logits, the vocabulary divided over the ranks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from inferd.engine.layers.target import BuildTarget
from inferd.engine.layers.weights import Placement, WeightLayer
from inferd.kernels.common.ops import Linear


class VocabParallel(WeightLayer):
    """`table[ceil(vocab / size), hidden]`: this rank's rows of the vocabulary, the last rank's rest zero.

    The table is the layer's own parameter `weight`, or another layer's that it is tied to.
    """

    def __init__(self, vocab_size: int, hidden_size: int, target: BuildTarget, tied_to: Tensor | None = None) -> None:
        super().__init__(target)
        self.vocab_size = vocab_size
        num_rows = -(-vocab_size // target.tp.size)
        self.first_id = min(target.tp.rank * num_rows, vocab_size)
        self.num_ids = min(num_rows, vocab_size - self.first_id)
        if tied_to is None:
            placement = Placement((vocab_size, hidden_size), self.num_ids, source_start=self.first_id)
            self.add_weight("weight", (num_rows, hidden_size), {None: placement})
            tied_to = self.get_parameter("weight").data
            tied_to[self.num_ids :].zero_()
        self.table = tied_to


class VocabParallelEmbedding(VocabParallel):
    """token_ids[t] -> [t, hidden]. A rank looks up the ids that it holds; the others come from the other ranks."""

    def forward(self, token_ids: Tensor) -> Tensor:
        tp = self.target.tp
        if tp.size == 1:
            return functional.embedding(token_ids, self.table)
        local = token_ids - self.first_id
        foreign = (local < 0) | (local >= self.num_ids)
        found = functional.embedding(local.masked_fill(foreign, 0), self.table)
        return tp.reduce(found.masked_fill(foreign.unsqueeze(-1), 0))


class ReplicatedEmbedding(WeightLayer):
    """ids[t] -> [t, hidden], from a table that every rank has whole."""

    def __init__(self, num_rows: int, hidden_size: int, target: BuildTarget) -> None:
        super().__init__(target)
        self.add_weight("weight", (num_rows, hidden_size), {None: Placement.whole(num_rows, hidden_size)})
        self.table = self.get_parameter("weight").data

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.table)


class ParallelLMHead(VocabParallel):
    """hidden[m, h] -> logits[m, vocab] in float32."""

    _linear: Linear | None = None

    def prepare(self) -> None:
        self._linear = self.target.ops.make_logits(self.table)
        del self.table  # what the kernel packed anew is held once; a tied table lives on in the embedding
        if "weight" in self.placements:
            del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        if self._linear is None:
            raise RuntimeError("logits were asked for before prepare()")
        logits = self.target.tp.gather(self._linear(hidden))
        return logits[:, : self.vocab_size]  # without the rows that only fill the last rank
