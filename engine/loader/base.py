"""From a model folder to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from inferd.engine.config import EngineConfig
from inferd.engine.errors import LoadError
from inferd.engine.layers.parallel import TensorParallel
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.layers.weights import WeightLayer, WeightMismatch
from inferd.engine.loader.dummy import fill_randomly
from inferd.engine.loader.names import MakeNames, NameMap, Stage, Target
from inferd.engine.loader.pooling_names import names_for
from inferd.engine.loader.safetensors import iterate_safetensors
from inferd.engine.models.base import BuildContext, CausalLM, Model, PoolingModel
from inferd.engine.models.registry import model_class, pooling_class
from inferd.kernels.common.ops import Ops

Progress = Callable[[int, int], None]  # bytes of parameters that are filled, bytes of all of them
CheckpointTensors = Iterator[tuple[str, Tensor, Path]]  # name, tensor, file

MAX_NAMES_SHOWN = 5
FIRST_POSITIONS = 4096  # that a model is ready for; how many more it gets depends on the memory that is left


def load_model(
    config: EngineConfig,
    ops: Ops,
    device: torch.device,
    *,
    tp: TensorParallel | None = None,
    progress: Progress | None = None,
    tensors: CheckpointTensors | None = None,
) -> CausalLM:
    """Build, fill and prepare a model that generates. Raises LoadError naming the file and the tensor that do not fit.

    `tp`: this rank's place among those that the layers are divided over; alone where not given. `tensors`: in place of
    what the model folder holds. Parameters exist once, in their final dtype and place: checkpoint tensors are views of
    the mapped file and are converted while they are copied.
    """
    model = model_class(config.model.architecture)(config.model, _context(config, ops, device, tp))
    _fill(model, config, NameMap, tensors, progress)
    return model


def load_pooling_model(
    config: EngineConfig,
    ops: Ops,
    device: torch.device,
    *,
    tp: TensorParallel | None = None,
    tensors: CheckpointTensors | None = None,
) -> PoolingModel:
    """The same of a model that pools."""
    settled = replace(config.model, pooler=config.pooler)
    model = pooling_class(config.model.architecture)(settled, _context(config, ops, device, tp))
    _fill(model, config, names_for(config.model.architecture), tensors)
    return model


def _context(config: EngineConfig, ops: Ops, device: torch.device, tp: TensorParallel | None) -> BuildContext:
    num_positions = min(config.scheduler.max_model_len, FIRST_POSITIONS)
    layers = range(config.model.num_layers)
    return BuildContext(ops, config.dtype, device, tp or TensorParallel(), layers, num_positions)


def _fill(
    model: Model,
    config: EngineConfig,
    make_names: MakeNames,
    tensors: CheckpointTensors | None,
    progress: Progress | None = None,
) -> None:
    model_config = config.model
    if config.load_format == "dummy":
        fill_randomly(model, config.weights_seed)
    else:
        layers = range(model_config.num_layers)
        stage = Stage(layers, model_config.num_layers, model_config.tie_embeddings)
        loader = DefaultModelLoader(model, stage, progress, make_names=make_names)
        loader.load_weights(tensors or checkpoint_tensors(config), model_config.path)
    model.prepare()


def checkpoint_tensors(config: EngineConfig) -> CheckpointTensors:
    """Every tensor of the checkpoint under its Hugging Face name, with the file it is in."""
    folder = config.model.path
    if config.load_format == "safetensors":
        yield from iterate_safetensors(folder)
        return
    from inferd.engine.loader.gguf import iterate_gguf

    path = gguf_file(folder)
    for name, tensor in iterate_gguf(path, config.model, TORCH_DTYPES[config.dtype]):
        yield name, tensor, path


def gguf_file(folder: Path) -> Path:
    """Raises LoadError unless there is exactly one."""
    paths = sorted(folder.glob("*.gguf"))
    if len(paths) != 1:
        raise LoadError(f"{folder} must hold exactly one GGUF file, it holds {len(paths)}")
    return paths[0]


class DefaultModelLoader:
    """Puts checkpoint tensors into a model's parameters: each tensor must land, each place be filled exactly once."""

    def __init__(
        self, model: Model, stage: Stage, progress: Progress | None = None, *, make_names: MakeNames = NameMap
    ) -> None:
        self._layers = dict(model.weight_layers())
        self._missing = {
            Target(f"{layer_name}.{name}", shard)
            for layer_name, layer in self._layers.items()
            for name, placements in layer.placements.items()
            for shard in placements
        }
        self._names = make_names(self._missing, stage)
        self._progress = progress
        self._placed_bytes = 0
        self._total_bytes = sum(_parameter_bytes(layer) for layer in self._layers.values())

    def load_weights(self, tensors: CheckpointTensors, folder: Path) -> None:
        """Raises LoadError naming the tensor and the file, or the tensors that never came."""
        for name, tensor, path in tensors:
            targets = self._names.targets(name)
            if targets is None:
                raise LoadError(f"{path} holds tensor {name}, which this model has no place for")
            for target in targets:
                self._place(target, name, tensor, path)
        if self._missing:
            names = sorted(self._names.checkpoint_name(slot) for slot in self._missing)
            more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
            raise LoadError(f"{folder} lacks {len(names)} tensors: {', '.join(names[:MAX_NAMES_SHOWN])}{more}")

    def _place(self, target: Target, name: str, tensor: Tensor, path: Path) -> None:
        if target not in self._missing:
            raise LoadError(f"{path} holds tensor {name} a second time")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise LoadError(f"{path}: tensor {name} holds {tensor.dtype}; quantised safetensors are not supported")
        layer_name, _, parameter = target.parameter.rpartition(".")
        try:
            num_bytes = self._layers[layer_name].weight_loader(parameter, tensor, target.shard)
        except WeightMismatch as error:
            raise LoadError(f"{path}: tensor {name}: {error}") from error
        self._missing.remove(target)
        self._placed_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._placed_bytes, self._total_bytes)


def _parameter_bytes(layer: WeightLayer) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters(recurse=False))
