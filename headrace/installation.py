"""Whether Headrace's packages are its own. Their names are common ones: Hugging Face has a package `kernels`, and any
folder may be called `workers`. Standard library only, and imports none of the packages that it asks about.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import headrace
from headrace.core.findings import Finding, fail, ok, warn

CHECK = "packages"
DISTRIBUTION = "headrace"
PACKAGES = ("headrace", "kernels", "kvtransfer", "workers", "router", "cluster", "bench")
ROOT = Path(headrace.__file__).resolve().parent.parent
"""Where this installation's packages lie side by side."""


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """Of one name; files are paths of `__init__.py`, "" where there is none."""

    expected: str
    found: str
    """What an import in this process gives."""
    in_working_folder: str
    """What the current folder has: worker processes look there first."""
    distributions: tuple[str, ...] = ()
    """Installed distributions that have a package of this name."""


def read_packages() -> dict[str, PackageFacts]:
    owners = packages_distributions()
    facts = {}
    for name in PACKAGES:
        spec, here = find_spec(name), PathFinder.find_spec(name, [str(Path.cwd())])
        facts[name] = PackageFacts(
            expected=str(ROOT / name / "__init__.py"),
            found=_file(spec.origin if spec else None),
            in_working_folder=_file(here.origin if here else None),
            distributions=tuple(sorted(set(owners.get(name, ())))),
        )
    return facts


def judge_packages(packages: Mapping[str, PackageFacts]) -> Finding:
    for name, facts in packages.items():
        if not facts.found:
            return fail(CHECK, f"{name} is not importable", "install Headrace again")
        if facts.found != facts.expected:
            return fail(
                CHECK,
                f"{name} is shadowed by {facts.found}; this installation's is {facts.expected}",
                "take that folder out of PYTHONPATH, or uninstall the distribution that it belongs to",
            )
        if facts.in_working_folder not in ("", facts.expected):
            return fail(
                CHECK,
                f"{name} would be shadowed in worker processes by {facts.in_working_folder}",
                "start Headrace in another folder",
            )
    for name, facts in packages.items():
        others = [other for other in facts.distributions if other != DISTRIBUTION]
        if others:
            return warn(
                CHECK,
                f"{', '.join(others)} has a package {name} too; ours is found first here",
                f"uninstall {others[0]}, or keep it in an environment of its own",
            )
    return ok(CHECK, f"{', '.join(packages)} from {ROOT}")


def child_environment() -> dict[str, str]:
    """This process's, for a Python process that must find this installation's packages."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _file(origin: str | None) -> str:
    return str(Path(origin).resolve()) if origin else ""
