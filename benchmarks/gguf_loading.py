"""Time and memory of reading a .gguf file: its header, and all of it.

    python benchmarks/gguf_loading.py model.gguf

Memory is the largest resident set while loading, less that before it; it includes the tokenizer
and the pages of the file.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import farspan


def resident() -> float:
    """MB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main(file: str) -> None:
    farspan.inspect("nope-twin")  # imports and first calls
    start = time.perf_counter()
    farspan.inspect(file)
    print(f"inspect {time.perf_counter() - start:.1f} s")
    before, peak, done = resident(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu = time.perf_counter(), time.process_time()
    model = farspan.load(file).model
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    watcher.join()
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 1e6
    print(f"load {wall:.1f} s, {cpu:.1f} s of CPU time")
    print(f"weights {size:.0f} MB, peak {peak - before:.0f} MB, {(peak - before) / size:.2f} times")


if __name__ == "__main__":
    main(sys.argv[1])
