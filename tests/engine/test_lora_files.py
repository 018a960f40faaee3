"""Adapter folders: what is read of them, and what is refused by its name before anything is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferd.engine.convert import convert_folder
from inferd.engine.errors import LoadError, NotSupported
from inferd.engine.lora.config import CONFIG_NAME, WEIGHTS_NAME, read_adapter_config
from inferd.engine.lora.files import AdapterTensors, read_adapter
from inferd.engine.testing.random_adapter import make_random_adapter
from inferd.engine.testing.random_checkpoint import make_random_checkpoint

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
MAX_RANK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def shapes(model: Path) -> dict[str, tuple[int, int]]:
    weights = load_file(model / "model.safetensors")
    found = {name.removesuffix(".weight"): tuple(weight.shape) for name, weight in weights.items() if "proj" in name}
    return found  # type: ignore[return-value]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(**config: Any) -> Path:
        return make_random_adapter(tmp_path / "adapter", model, **config)

    return make


def edit(folder: Path, **fields: Any) -> Path:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def read(folder: Path, shapes: dict[str, tuple[int, int]]) -> AdapterTensors:
    return read_adapter(folder, read_adapter_config(folder, MAX_RANK), shapes)


def name_of(matrix: str, factor: str) -> str:
    return f"base_model.model.{matrix}.lora_{factor}.weight"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(folder / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)
    return folder


def test_factors_by_the_matrices_of_the_model(make: Callable[..., Path], shapes: dict[str, tuple[int, int]]) -> None:
    folder = make(rank=4, targets=["q_proj", "down_proj"])
    found = read(folder, shapes).factors
    assert set(found) == {matrix for matrix in shapes if matrix.endswith(("q_proj", "down_proj"))}
    num_outputs, num_inputs = shapes[Q]
    a, b = found[Q]
    assert (a.shape, b.shape) == ((4, num_inputs), (num_outputs, 4))
    assert torch.equal(b, load_file(folder / WEIGHTS_NAME)[name_of(Q, "B")])


@pytest.mark.parametrize(
    ("fields", "scale"),
    [(dict(r=8, lora_alpha=16), 2.0), (dict(r=16, lora_alpha=6.0, use_rslora=True), 1.5), (dict(r=4, lora_alpha=0), 0)],
)
def test_the_scale(make: Callable[..., Path], fields: dict[str, Any], scale: float) -> None:
    assert read_adapter_config(edit(make(), **fields), MAX_RANK).scale == scale


def test_what_is_over_when_training_is_over_is_passed_by(make: Callable[..., Path]) -> None:
    """All that PEFT writes for a plain adapter."""
    unset = ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config")
    empty: dict[str, Any] = dict(alpha_pattern={}, rank_pattern={}, loftq_config={}, modules_to_save=None)
    trained = dict(lora_dropout=0.1, megatron_core="megatron.core", qalora_group_size=16, peft_version="0.21.2")
    flags = dict(use_dora=False, lora_bias=False, fan_in_fan_out=False, inference_mode=True, init_lora_weights=True)
    read_adapter_config(edit(make(), **dict.fromkeys(unset), **empty, **trained, **flags), MAX_RANK)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "loftq"),
        ("trainable_token_indices", [1]),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", ["embed_tokens"]),
        ("an_option_of_tomorrow", {"strength": 2}),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(make: Callable[..., Path], name: str, value: Any) -> None:
    with pytest.raises(NotSupported, match=name):
        read_adapter_config(edit(make(), **{name: value}), MAX_RANK)


@pytest.mark.parametrize(
    ("name", "value"), [("r", 0), ("r", 2.5), ("r", True), ("lora_alpha", "8"), ("lora_alpha", None)]
)
def test_wrong_numbers_are_named(make: Callable[..., Path], name: str, value: Any) -> None:
    with pytest.raises(LoadError, match=rf"{CONFIG_NAME}: {name} must be"):
        read_adapter_config(edit(make(), **{name: value}), MAX_RANK)


def test_numbers_that_json_does_not_have_are_named(make: Callable[..., Path]) -> None:
    with pytest.raises(LoadError, match="lora_alpha must be a finite number"):
        read_adapter_config(edit(make(), lora_alpha=float("nan")), MAX_RANK)


def test_a_rank_above_the_limit_names_the_option(make: Callable[..., Path]) -> None:
    with pytest.raises(NotSupported, match=r"rank 17 is above max_lora_rank=16"):
        read_adapter_config(make(rank=17), MAX_RANK)


def test_what_is_no_adapter_folder(tmp_path: Path, model: Path) -> None:
    for folder in (tmp_path / "nowhere", model, model / "config.json"):
        with pytest.raises(LoadError, match=f"not an adapter folder: it has no {CONFIG_NAME}"):
            read_adapter_config(folder, MAX_RANK)


@pytest.mark.parametrize("text", ["[]", "{", "\0", '{"a": ' * 100_000])
def test_a_broken_config(make: Callable[..., Path], text: str) -> None:
    folder = make()
    (folder / CONFIG_NAME).write_text(text)
    with pytest.raises(LoadError, match=CONFIG_NAME):
        read_adapter_config(folder, MAX_RANK)


def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(name_of(Q, "A")), rf"{Q} has only .*lora_B\.weight, not both"),
        (add(name_of(Q, "A"), 8, 3), r"lora_A\.weight has shape \[8, 3\], expected \[8, "),
        (add(name_of(Q, "B"), 8), r"lora_B\.weight has shape \[8\], expected"),
        (add(name_of(Q.replace("1", "7"), "A"), 8, 3), r"adapts model\.layers\.7\.self_attn\.q_proj, which this model"),
        (add("base_model.model.lm_head.lora_A.weight", 8, 3), r"adapts lm_head, which is not supported"),
        (add("base_model.model.model.embed_tokens.lora_embedding_A", 8, 3), "an adapted embedding"),
        (add(f"base_model.model.{Q}.lora_magnitude_vector", 8), "use_dora"),
        (add("base_model.model.lm_head.modules_to_save.weight", 8), "modules_to_save"),
        (add("something", 8), "tensor something is no factor"),
        (add(f"base_model.model.{Q}.lora_B.bias", 8), "is no factor of a plain"),
        (lambda tensors: tensors.update({name_of(Q, "A"): tensors[name_of(Q, "A")].to(torch.int8)}), "holds I8"),
        (lambda tensors: tensors.clear(), "holds no tensors"),
    ],
)
def test_tensors_that_do_not_fit(
    make: Callable[..., Path], shapes: dict[str, tuple[int, int]], change: Callable[..., Any], message: str
) -> None:
    folder = rewrite(make(), change)
    with pytest.raises((LoadError, NotSupported), match=rf"{WEIGHTS_NAME}.*{message}"):
        read(folder, shapes)


def test_a_damaged_file_is_named(make: Callable[..., Path], shapes: dict[str, tuple[int, int]]) -> None:
    folder = make()
    path = folder / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(LoadError, match=f"{WEIGHTS_NAME} is truncated"):
        read(folder, shapes)
    path.unlink()
    with pytest.raises(LoadError, match=f"it has no {WEIGHTS_NAME}"):
        read(folder, shapes)


def test_pickled_weights_are_refused_and_can_be_converted(
    make: Callable[..., Path], shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    folder = make()
    expected = read(folder, shapes)
    torch.save(load_file(folder / WEIGHTS_NAME), folder / "adapter_model.bin")
    (folder / WEIGHTS_NAME).unlink()
    with pytest.raises(LoadError, match="inferd convert"):
        read(folder, shapes)
    convert_folder(folder, tmp_path / "converted")
    found = read(tmp_path / "converted", shapes)
    assert found.factors.keys() == expected.factors.keys()
    for matrix, (a, b) in expected.factors.items():
        assert torch.equal(found.factors[matrix][0], a)
        assert torch.equal(found.factors[matrix][1], b)


def test_the_digest_is_of_all_that_counts(make: Callable[..., Path], shapes: dict[str, tuple[int, int]]) -> None:
    folder = make()
    first = read(folder, shapes).digest
    assert read(folder, shapes).digest == first
    rewrite(folder, lambda tensors: tensors[name_of(DOWN, "B")].mul_(1.5))
    second = read(folder, shapes).digest
    edit(folder, lora_alpha=1)
    assert len({first, second, read(folder, shapes).digest}) == 3
