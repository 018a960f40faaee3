"""Block hashes name everything that shapes a block's keys and values, and nothing else."""

from __future__ import annotations

from inferd.engine.core.kv.hashing import make_block_key, make_extra_keys
from inferd.engine.messages import MultimodalFeature

TEN = list(range(10, 20))


def test_only_full_blocks_have_a_hash(make_request):
    assert [len(make_request(prompt=TEN[:n]).block_hashes) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_appending_gives_the_hashes_that_hashing_at_once_gives(make_request):
    grown = make_request(prompt=TEN[:1])
    for token_id in TEN[1:]:
        grown.append_token(token_id)
    assert grown.block_hashes == make_request(prompt=TEN).block_hashes


def test_equal_blocks_under_different_parents_differ(make_request):
    one = make_request(prompt=[1, 2, 3, 4, 9, 9, 9, 9]).block_hashes
    other = make_request(prompt=[5, 6, 7, 8, 9, 9, 9, 9]).block_hashes
    assert one[1] != other[1]


def test_equal_blocks_at_two_places_of_one_prompt_differ(make_request):
    first, second = make_request(prompt=[9] * 8).block_hashes
    assert first != second


def test_engines_with_different_seeds_never_agree(make_request):
    one, other = (make_request(prompt=TEN, seed=seed).block_hashes for seed in (b"x", b"y"))
    assert not set(one) & set(other)


def test_requests_share_hashes_under_one_salt_only(make_request):
    hashes = {salt: make_request(prompt=TEN, cache_salt=salt).block_hashes for salt in ("a", "b", None, "")}
    assert len({h for chain in hashes.values() for h in chain}) == 8
    assert make_request(prompt=TEN, cache_salt="a").block_hashes == hashes["a"]


def test_the_salt_stands_in_the_first_block_alone():
    assert make_extra_keys(0, 4, cache_salt="s") != b""
    assert make_extra_keys(4, 8, cache_salt="s") == b""


def test_an_adapter_stands_in_every_block():
    keys = {make_extra_keys(start, start + 4, adapter=name) for start in (0, 4) for name in ("x", "y")}
    assert len(keys) == 2
    assert b"" not in keys


def test_a_feature_changes_the_blocks_it_touches_and_those_after(make_request):
    plain = make_request(prompt=[9] * 16).block_hashes
    image = make_request(prompt=[9] * 16, features=[MultimodalFeature("cat", offset=5, length=2)]).block_hashes
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]
    assert make_extra_keys(8, 12, features=[MultimodalFeature("cat", 5, 2)]) == b""


def test_two_features_of_equal_shape_differ_by_digest(make_request):
    cat, dog = (
        make_request(prompt=[9] * 4, features=[MultimodalFeature(name, 1, 2)]).block_hashes for name in ("cat", "dog")
    )
    assert cat != dog


def test_a_features_place_counts_relative_to_its_block():
    at_5, at_6, at_9 = (
        make_extra_keys(start, start + 4, features=[MultimodalFeature("cat", offset, 1)])
        for start, offset in ((4, 5), (4, 6), (8, 9))
    )
    assert at_5 != at_6
    assert at_5 == at_9


def test_texts_cannot_run_into_each_other():
    one = make_extra_keys(0, 4, features=[MultimodalFeature("ab", 0, 1), MultimodalFeature("c", 0, 1)])
    other = make_extra_keys(0, 4, features=[MultimodalFeature("a", 0, 1), MultimodalFeature("bc", 0, 1)])
    assert one != other
    assert make_extra_keys(0, 4, adapter="x") != make_extra_keys(0, 4, cache_salt="x")


def test_a_block_key_holds_the_group(make_request):
    block_hash = make_request(prompt=TEN).block_hashes[0]
    assert make_block_key(block_hash, 0) != make_block_key(block_hash, 1)
