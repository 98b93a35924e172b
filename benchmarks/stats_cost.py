"""What measuring itself costs a collector: one sampled step against one plain step, times how often it samples."""

from __future__ import annotations

import statistics
import time

import torch
from single_process import Greedy, cartpole

from rlcollect import Collector
from rlcollect.rollout.timing import GAP


def main() -> None:
    torch.set_num_threads(1)
    for lanes in (1, 16):
        collector = Collector(cartpole, Greedy(), frames_per_batch=4096, num_envs=lanes)
        engine = collector._worker.engine
        seconds = {"plain": [], "sampled": []}
        for _ in range(30):
            for kind, countdown in (("plain", 10**9), ("sampled", 0)):
                engine.sampler.countdown = countdown
                start = time.perf_counter()
                for _ in range(50):
                    engine.sampler.countdown = countdown
                    engine.rollout(1)
                seconds[kind].append((time.perf_counter() - start) / 50)
        extra = statistics.median(seconds["sampled"]) - statistics.median(seconds["plain"])
        collector.shutdown()
        with Collector(cartpole, Greedy(), frames_per_batch=4096, num_envs=lanes) as other:
            list(zip(range(3), other, strict=False))
            step = other.stats().seconds / other.collected_frames * lanes
        print(
            f"{lanes:3} lanes: a sample costs {extra * 1e6:.1f} us, a step {step * 1e6:.1f} us, one in {GAP} steps is "
            f"sampled: {extra / step / GAP:.3%} of the time"
        )


if __name__ == "__main__":
    main()
