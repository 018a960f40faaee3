"""Who is timed: this engine, and others on the same work in the same process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from inferd.engine.bench.workloads import SAMPLED_TEMPERATURE, SAMPLED_TOP_P, Workload
from inferd.engine.config import EngineArgs
from inferd.engine.frontend.llm import LLM
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.loader.base import checkpoint_tensors
from inferd.engine.model_config import read_json
from inferd.engine.resolve import resolve


class Peer(Protocol):
    name: str

    def generate(self, prompts: list[list[int]], workload: Workload) -> None:
        """Returns once every request of the workload has all its tokens."""
        ...

    def close(self) -> None: ...


class Inferd:
    name = "inferd"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.insight = llm.insight

    def generate(self, prompts: list[list[int]], workload: Workload) -> None:
        outputs = self._llm.generate(prompts, workload.params(), progress=False)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != workload.total_output_tokens:
            raise RuntimeError(f"{workload.name}: {made} tokens came out, {workload.total_output_tokens} were due")

    def close(self) -> None:
        self._llm.shutdown()


class Transformers:
    """`generate` of transformers on the same weights and dtype, the whole batch at once (prompts are equally long)."""

    name = "transformers"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = load_transformers(folder, dtype)

    def generate(self, prompts: list[list[int]], workload: Workload) -> None:
        ids = torch.tensor(prompts)
        noise: dict[str, Any] = {"do_sample": False}
        if workload.sampled:
            noise = {"do_sample": True, "temperature": SAMPLED_TEMPERATURE, "top_p": SAMPLED_TOP_P, "top_k": 0}
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=workload.output_tokens,
                max_new_tokens=workload.output_tokens,
                pad_token_id=0,
                **noise,
            )

    def close(self) -> None:
        del self._model


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """The folder's weights in transformers' own model class, whatever format they are stored in."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = next(name for name, known in TORCH_DTYPES.items() if known == dtype)
    ours = resolve(EngineArgs(model=str(folder), device="cpu", dtype=name))  # dequantised to it, rounded once
    fields = read_json(folder / "config.json")
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    state = {name: tensor.to(dtype) for name, tensor, _ in checkpoint_tensors(ours)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    lost = [name for name in missing if not (ours.model.tie_embeddings and name == "lm_head.weight")]
    if lost or unexpected:
        raise RuntimeError(f"transformers lacks {lost} and does not know {unexpected}")
    model.tie_weights()
    return model.eval()
