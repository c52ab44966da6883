"""One Prometheus text of several gateways' texts, for the address that they share: whoever takes the connection tells
of all. Pure.

A gateway's own series get a label `gateway`. Series of workers, which every gateway has, are taken from one text and
keep their labels, so that nothing is counted twice and no series comes and goes with who was asked.
"""

from __future__ import annotations

from collections.abc import Mapping

_OF_WORKER = 'worker="'


def merged(texts: Mapping[str, str], workers_from: str) -> str:
    """`texts` by gateway, each as `prometheus_client.generate_latest` writes it. Families stay together, as the format
    demands.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for gateway in sorted(texts):
        family = ""
        for line in texts[gateway].splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                if family not in heads:
                    heads[family], samples[family] = [], []
                is_new = not heads[family]
            if line.startswith("#"):
                if is_new:
                    heads[family].append(line)
            elif _OF_WORKER not in line:
                samples[family].append(_labelled(line, gateway))
            elif gateway == workers_from:
                samples[family].append(line)
    return "".join(f"{line}\n" for family in heads for line in heads[family] + samples[family])


def _labelled(sample: str, gateway: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{gateway="{gateway}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{gateway="{gateway}"}} {value}'
