"""adapter_config.json of a PEFT adapter → `AdapterConfig`. No torch.

Whatever would change the arithmetic and is not done here is refused by its name, options that are not known included:
an adapter that is served answers as it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd.engine.errors import LoadError, NotSupported
from inferd.engine.model_config import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_NAME = "adapter_model.bin"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_TASKS = (None, "CAUSAL_LM")
# Those change the base model's weights, or need them changed, before training begins.
_REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Read below, or without a meaning once training is over.
_KNOWN = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "target_modules", "peft_type", "task_type", "init_lora_weights", "bias"),
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "lora_dropout"),
        *("exclude_modules", "layers_pattern", "layers_to_transform", "megatron_core", "qalora_group_size"),
        *("ensure_weight_tying", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "runtime_config"),
    }
)


@dataclass(frozen=True)
class AdapterConfig:
    rank: int
    alpha: float
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by. With the square root: Kalajdzievski, "A Rank Stabilization
        Scaling Factor for Fine-Tuning with LoRA" (2023)."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


def read_adapter_config(folder: Path, max_rank: int) -> AdapterConfig:
    """Raises LoadError for a folder that is no adapter, NotSupported for one that asks for what is not done here."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise LoadError(f"{folder} is not an adapter folder: it has no {CONFIG_NAME}")
    fields = read_json(path)
    _check_kind(fields, path)
    _check_targets(fields.get("target_modules"), path)
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise LoadError(f"{path}: r must be a whole number above 0, not {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise LoadError(f"{path}: lora_alpha must be a finite number, not {alpha!r}")
    if rank > max_rank:
        raise NotSupported(f"{path}: rank {rank} is above max_lora_rank={max_rank}; start the engine with more")
    return AdapterConfig(rank, float(alpha), fields.get("use_rslora") is True)


def _check_kind(fields: Mapping[str, Any], path: Path) -> None:
    if fields.get("peft_type") != "LORA":
        raise NotSupported(f"{path}: peft_type={fields.get('peft_type')!r} is not supported; only LORA is")
    if fields.get("task_type") not in _TASKS:
        raise NotSupported(f"{path}: task_type={fields['task_type']!r} is not supported; only CAUSAL_LM is")
    if fields.get("bias") not in (None, "none"):
        raise NotSupported(f'{path}: bias={fields["bias"]!r} is not supported; only "none" is')
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_REWRITING):
        raise NotSupported(
            f"{path}: init_lora_weights={initial!r} is not supported, because it belongs to a changed base model; "
            "convert the adapter to a plain one"
        )
    for name, value in fields.items():
        if name not in _KNOWN and value not in (None, False, [], {}, ""):
            raise NotSupported(f"{path}: {name}={value!r:.80} is not supported; adapters are plain low-rank ones")


def _check_targets(targets: Any, path: Path) -> None:
    """A pattern says nothing here: what is adapted is told by the tensors."""
    if not isinstance(targets, list):
        return
    for target in targets:
        if not isinstance(target, str) or target.rpartition(".")[2] not in LINEARS:
            known = ", ".join(LINEARS)
            raise NotSupported(
                f"{path}: target_modules has {target!r:.80}, which cannot be adapted; supported: {known}"
            )
