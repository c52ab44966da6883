"""Live requests by the client's label, and which were asked for as branches of which.

A child is bound to the requests that bear its parent's label when it comes, so that a later one of the same label has
no part in it. Does not: cancel, or know what a request is.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Member(Generic[T]):
    name: tuple[str, str] | None
    children: dict[T, None] = field(default_factory=dict)
    parents: list[T] = field(default_factory=list)


class Kin(Generic[T]):
    """Members are hashed by identity; every operation costs what it returns."""

    def __init__(self) -> None:
        self._members: dict[T, _Member[T]] = {}
        self._names: dict[tuple[str, str], dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def find(self, tenant: str, label: str) -> list[T]:
        """The members of that label, oldest first; nobody has the label ''."""
        return list(self._names.get((tenant, label), ()))

    def join(self, member: T, tenant: str, label: str, parents: list[T]) -> None:
        """`parents` that are gone by now are left out."""
        name = (tenant, label) if label else None
        known = [parent for parent in parents if parent in self._members]
        self._members[member] = _Member(name, parents=known)
        if name is not None:
            self._names.setdefault(name, {})[member] = None
        for parent in known:
            self._members[parent].children[member] = None

    def leave(self, member: T) -> None:
        """Idempotent. Its children live on, as nobody's."""
        gone = self._members.pop(member, None)
        if gone is None:
            return
        for parent in gone.parents:
            if (kept := self._members.get(parent)) is not None:
                kept.children.pop(member, None)
        if gone.name is not None:
            mates = self._names[gone.name]
            del mates[member]
            if not mates:
                del self._names[gone.name]

    def disown(self, member: T) -> list[T]:
        """All descendants, the youngest generation first, and none of them is anybody's child any more."""
        found: list[T] = []
        seen = {member}
        frontier = [member]
        while frontier:
            children: list[T] = []
            for one in frontier:
                if (known := self._members.get(one)) is not None:
                    children += [child for child in known.children if child not in seen]
                    seen.update(known.children)
                    known.children.clear()
            found += children
            frontier = children
        return found[::-1]
