"""Who may read from whom, and over which lane: the part that knows no sockets."""

from __future__ import annotations

import pytest

from kvtransfer.core.pairing import Measured, card_of, fastest, lease_proof, mismatch, pair_key, pools_said, proof

IDENTITY = {"weights": b"\x01\x02", "kv_dtype": "float32", "tp": 2}


def test_a_card_says_in_words_what_an_identity_hashes() -> None:
    assert card_of(IDENTITY, 16) == {
        "protocol": "1",
        "block_size": "16",
        "weights": "0102",
        "kv_dtype": "float32",
        "tp": "2",
    }


@pytest.mark.parametrize("name", sorted(card_of(IDENTITY, 16)))
def test_every_part_that_differs_is_named_with_both_values(name: str) -> None:
    card = card_of(IDENTITY, 16)
    assert mismatch(card, dict(card)) == ""
    assert mismatch(card, card | {name: "other"}) == f"{name}: {card[name]} here, other there"
    missing = {key: value for key, value in card.items() if key != name}
    assert mismatch(missing, card) == f"{name}: nothing here, {card[name]} there"


def test_another_protocol_is_the_reason_whatever_else_differs() -> None:
    assert mismatch({"protocol": "1", "a": "1"}, {"protocol": "2", "a": "2"}).startswith("protocol: 1 here, 2 there")


def test_what_a_peer_says_is_cut_before_it_is_repeated() -> None:
    assert len(mismatch({"a": "1"}, {"a": "x" * 10_000, "b" * 10_000: ""})) < 300


def test_a_key_depends_on_the_token_both_names_and_both_nonces() -> None:
    said = ("token", "reader", b"r" * 16, "holder", b"h" * 16)
    keys = {pair_key(*said)}
    for place, other in enumerate(("t", "re", b"R" * 16, "ader", b"H" * 16)):
        keys.add(pair_key(*said[:place], other, *said[place + 1 :]))  # type: ignore[arg-type]
    assert len(keys) == 6
    # fields cannot slide into each other
    assert pair_key("t", "ab", b"c", "d", b"") != pair_key("t", "a", b"bc", "d", b"")


def test_proofs_of_the_two_sides_and_of_leases_are_all_different() -> None:
    key = b"k" * 32
    leases = [("r", 0, 0, b""), ("r", 1, 0, b""), ("r", 0, 1, b""), ("s", 0, 0, b""), ("r", 0, 0, b"h")]
    assert len({proof(key, b"reader"), proof(key, b"holder"), *(lease_proof(key, *lease) for lease in leases)}) == 7


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([("ucx", 6.0), ("tcp", 2.0)], "ucx"),
        ([("ucx", 2.0), ("tcp", 2.9)], "ucx"),
        ([("ucx", 0.3), ("tcp", 2.0)], "tcp"),
        ([("tcp", 1.0)], "tcp"),
    ],
)
def test_the_preferred_lane_is_used_unless_another_is_clearly_faster(
    measured: list[tuple[str, float]], best: str
) -> None:
    assert fastest([Measured(*lane) for lane in measured]).lane == best


def test_a_proof_is_of_what_is_said_beside_it() -> None:
    key, lanes = b"k" * 32, [{"ucx": b"a", "tcp": b"b"}, {"ucx": b"c"}]
    said = [{}, {"weights": "abc"}, {"weights": "abd"}, {"weight": "sabc"}, pools_said(lanes), pools_said(lanes[::-1])]
    assert len({proof(key, b"reader", each) for each in said}) == 6
    assert proof(key, b"reader", {"a": "1", "b": "2"}) == proof(key, b"reader", {"b": "2", "a": "1"})
