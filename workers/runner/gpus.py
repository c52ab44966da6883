"""Says what torch knows of this machine's GPUs, as one JSON object: `python -m workers.runner.gpus`."""

from __future__ import annotations

import itertools
import json

import torch


def main() -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = itertools.combinations(range(count), 2)
    answer = {
        "names": [torch.cuda.get_device_name(index) for index in range(count)],
        "without_peer_access": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
