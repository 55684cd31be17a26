"""The dense network in one of several processes: warms up, reports it, and measures on request.

    python -m elasticrec.bench.dense_process JOB LINES SECONDS

Prints `ready`, waits for a line, steps for SECONDS on one thread, then prints samples, seconds and CPU seconds.
"""

import sys
import time
from pathlib import Path

from elasticrec.bench.network import WARM_UP_STEPS, dense_step
from elasticrec.config import load_job


def main(job: str, lines: str, seconds: str) -> None:
    """Run the measurement."""
    step, num_samples = dense_step(load_job(Path(job)), Path(lines).read_bytes(), threads=1)
    for _ in range(WARM_UP_STEPS):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    steps, start, start_cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < float(seconds):
        step()
        steps += 1
    took, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    print(steps * num_samples, took, cpu, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
