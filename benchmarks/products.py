"""bf16 products of the race's sizes on this CPU: torch's own, and through fp32. Milliseconds, one thread."""

import time

import torch

from lindos.parallel.products import emulated


def milliseconds(run, count: int = 10) -> float:
    run()
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count * 1e3


torch.set_num_threads(1)
print(f"this CPU emulates bf16 products: {emulated()}")
for m, k, n in ((1024, 256, 128), (1024, 256, 344), (1024, 344, 256), (1024, 256, 2048)):
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    own = milliseconds(lambda a=a, b=b: a @ b.t())
    wide = milliseconds(lambda a=a, b=b: (a.float() @ b.float().t()).bfloat16())
    print(f"[{m}, {k}] x [{k}, {n}]: torch {own:7.2f}   through fp32 {wide:7.2f}   ratio {own / wide:5.1f}")
