"""Who is whose branch."""

from __future__ import annotations

import random

from router.core.kin import Kin


def test_descendants_come_youngest_generation_first_and_only_once() -> None:
    kin: Kin[str] = Kin()
    kin.join("root", "t", "r", [])
    kin.join("a", "t", "a", ["root"])
    kin.join("b", "t", "", ["root"])
    kin.join("a1", "t", "", ["a", "root"])
    heirs = kin.disown("root")
    assert sorted(heirs) == ["a", "a1", "b"]
    assert kin.disown("root") == [], "nobody is its child any more"


def test_a_child_belongs_to_those_that_had_the_label_when_it_came() -> None:
    kin: Kin[str] = Kin()
    kin.join("first", "t", "r", [])
    kin.join("other tenant", "u", "r", [])
    kin.join("child", "t", "", kin.find("t", "r"))
    kin.join("second", "t", "r", [])
    assert kin.find("t", "r") == ["first", "second"]
    assert kin.disown("second") == kin.disown("other tenant") == []
    assert kin.disown("first") == ["child"]


def test_nobody_has_the_empty_label() -> None:
    kin: Kin[str] = Kin()
    kin.join("a", "t", "", [])
    assert kin.find("t", "") == []


def test_those_that_left_are_in_nobodys_way() -> None:
    kin: Kin[str] = Kin()
    kin.join("root", "t", "r", [])
    kin.join("a", "t", "a", ["root"])
    kin.join("b", "t", "b", ["a"])
    kin.leave("a")
    kin.leave("a")
    assert kin.disown("root") == [], "b is nobody's since a ended well"
    kin.join("late", "t", "", ["a"])
    kin.leave("late")
    kin.leave("root")
    kin.leave("b")
    assert len(kin) == 0 and kin.find("t", "r") == []


def test_random_families_leave_nothing() -> None:
    rng = random.Random(1)
    kin: Kin[int] = Kin()
    live: list[int] = []
    for member in range(2000):
        kin.join(member, "t", f"l{rng.randrange(20)}", rng.sample(live, min(len(live), rng.randrange(3))))
        live.append(member)
        if rng.random() < 0.2:
            heirs = kin.disown(rng.choice(live))
            assert len(set(heirs)) == len(heirs) and set(heirs) <= set(live)
        while len(live) > 30 or (live and rng.random() < 0.3):
            kin.leave(live.pop(rng.randrange(len(live))))
    for member in live:
        kin.leave(member)
    assert len(kin) == 0 and not kin._names
