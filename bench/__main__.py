"""`python -m bench`: runs the benchmarks that exist and prints machine, versions, command, medians and spread.

python -m bench startup [--runs 5]      `headrace serve` until ready, and until the first answered token
"""

from __future__ import annotations

import argparse

from bench import startup


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("name", nargs="?", default="startup", choices=["startup"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    args = parser.parse_args()
    startup.run(args.config, args.runs)


if __name__ == "__main__":
    main()
