"""One process of the streaming suites: attaches the artifact and runs forwards when told; a JSON line an answer.

Arguments: store root, checkpoint, device, tokens, blocks, hidden. Reads ``run N`` and ``end`` lines.
"""

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.stream_model import Shape, Transformer, sample
from benchmarks.stream_timing import mapped_bytes, settle
from hostweights import Config, Mode, open_sync


def main() -> None:
    """Attach, answer, end."""
    root, checkpoint, device = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    tokens, shape = int(sys.argv[4]), Shape(int(sys.argv[5]), int(sys.argv[6]))
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED)) as host, torch.inference_mode():
        loaded = host.load(lambda: Transformer(shape), checkpoint)
        attachment = host.attach(loaded, device=device)
        x = sample(shape, tokens, device)
        loaded.module(x)
        settle(device)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            words = line.split()
            if words[0] == "end":
                break
            before = host.ring(attachment).copied_bytes
            began_s = time.time()
            for _ in range(int(words[1])):
                loaded.module(x)
            settle(device)
            ended_s = time.time()
            after = host.ring(attachment).copied_bytes
            answer = {"began_s": began_s, "ended_s": ended_s, "copied_bytes": after - before, **mapped_bytes(root)}
            print(json.dumps(answer), flush=True)


main()
