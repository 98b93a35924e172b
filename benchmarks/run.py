"""Every benchmark, one after the other: the figures behind README.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

for name in (
    "single_process",
    "policies",
    "vector_environments",
    "tensordict_environments",
    "frames",
    "compact",
    "workers",
    "weights",
    "process_vector_env",
    "stragglers",
    "trajectories",
    "whole_episodes",
    "buffers",
    "replay",
    "cluster",
    "import_time",
    "stats_cost",
):
    print(f"# python benchmarks/{name}.py", flush=True)
    subprocess.run([sys.executable, HERE / f"{name}.py"], check=True)
