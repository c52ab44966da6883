"""One Prometheus text of several gateways' own series, for the address that they share: whoever takes the connection
tells of all. Pure.

Each series gets a label `gateway`. Series of workers, which every gateway has, are not in here: the gateway that is
asked adds them once, so that nothing is counted twice and no series comes and goes with who was asked.
"""

from __future__ import annotations

from collections.abc import Mapping

_UP = "headrace_gateway_up"


def merged(texts: Mapping[str, str | None]) -> str:
    """`texts` by gateway, each as `prometheus_client.generate_latest` writes it; None of one that did not answer.
    Families stay together, as the format demands.
    """
    heads = {_UP: [f"# HELP {_UP} Whether a gateway told its own series", f"# TYPE {_UP} gauge"]}
    samples = {_UP: [f'{_UP}{{gateway="{gateway}"}} {float(texts[gateway] is not None)}' for gateway in sorted(texts)]}
    for gateway in sorted(texts):
        family = ""
        for line in (texts[gateway] or "").splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                if family not in heads:
                    heads[family], samples[family] = [], []
                is_new = not heads[family]
            if not line.startswith("#"):
                samples[family].append(_labelled(line, gateway))
            elif is_new:
                heads[family].append(line)
    return "".join(f"{line}\n" for family in heads for line in heads[family] + samples[family])


def _labelled(sample: str, gateway: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{gateway="{gateway}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{gateway="{gateway}"}} {value}'
