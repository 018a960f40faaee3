"""Checkpoint names to parameters and shards."""

from __future__ import annotations

import pytest

from inferd.engine.loader.names import EMBEDDING, HEAD, NameMap, Stage, Target

Q_SLOT = Target("model.layers.1.self_attn.qkv_proj.weight", "q")
SLOTS = (
    Target(EMBEDDING),
    Q_SLOT,
    Target("model.layers.1.self_attn.qkv_proj.bias", "k"),
    Target("model.layers.1.self_attn.qkv_proj.weight", "v"),
    Target("model.layers.1.self_attn.o_proj.weight"),
    Target("model.layers.1.mlp.gate_up_proj.weight", "gate"),
    Target("model.layers.1.mlp.gate_up_proj.weight", "up"),
    Target("model.layers.1.input_layernorm.weight"),
    Target("model.norm.weight"),
    Target(HEAD),
)


def make_map(layers: range = range(4), tie_embeddings: bool = False, without: tuple[Target, ...] = ()) -> NameMap:
    return NameMap((slot for slot in SLOTS if slot not in without), Stage(layers, 4, tie_embeddings))


@pytest.mark.parametrize(
    ("name", "parameter", "shard"),
    [
        ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.qkv_proj.weight", "q"),
        ("model.layers.1.self_attn.k_proj.bias", "model.layers.1.self_attn.qkv_proj.bias", "k"),
        ("model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.qkv_proj.weight", "v"),
        ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight", None),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.gate_up_proj.weight", "gate"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj.weight", "up"),
        ("model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight", None),
        ("model.embed_tokens.weight", "model.embed_tokens.weight", None),
        ("lm_head.weight", "lm_head.weight", None),
    ],
)
def test_name_goes_to_parameter_and_shard(name: str, parameter: str, shard: str | None) -> None:
    names = make_map()
    assert names.targets(name) == (Target(parameter, shard),)
    assert names.checkpoint_name(Target(parameter, shard)) == name


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.foo.weight",
        "model.layers.1.self_attn.qkv_proj.weight",  # fused already: would need a split that we do not know
        "model.layers.4.self_attn.q_proj.weight",  # beyond the last layer
        "model.layers.x.self_attn.q_proj.weight",
        "model.layers.99999999999999999999.self_attn.q_proj.weight",
        "vision.patch.weight",
        "",
    ],
)
def test_unexpected_names_have_no_target(name: str) -> None:
    assert make_map().targets(name) is None


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_derived_buffers_are_skipped(name: str) -> None:
    assert make_map().targets(name) == ()


def test_foreign_layers_and_ends_are_skipped() -> None:
    names = make_map(range(1, 2), without=(Target(EMBEDDING), Target(HEAD), Target("model.norm.weight")))
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.3.anything", EMBEDDING, "model.norm.weight", HEAD):
        assert names.targets(name) == ()
    assert names.targets("model.layers.1.self_attn.q_proj.weight") == (Q_SLOT,)


def test_tied_head_in_the_checkpoint_is_skipped() -> None:
    names = make_map(tie_embeddings=True, without=(Target(HEAD),))
    assert names.targets(HEAD) == ()
    assert names.targets(EMBEDDING) == (Target(EMBEDDING),)


def test_tied_head_of_a_last_stage_is_filled_from_the_embedding() -> None:
    names = make_map(range(1, 4), tie_embeddings=True, without=(Target(EMBEDDING),))
    assert names.targets(EMBEDDING) == (Target(HEAD),)
    assert names.targets(HEAD) == ()
    assert names.checkpoint_name(Target(HEAD)) == EMBEDDING
