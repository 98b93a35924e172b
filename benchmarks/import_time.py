"""Time to import rlcollect, beside importing torch, tensordict and gymnasium alone. Whole processes, in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    ratios = []
    for _ in range(8):
        bare = seconds("import torch, tensordict, gymnasium")
        ratios.append(seconds("import rlcollect") / bare)
    print(f"import rlcollect / import what it stands on: {statistics.median(ratios[1:]):.3f}")


if __name__ == "__main__":
    main()
