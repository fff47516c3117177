"""
The machine a program runs on: device, precision, compilation, processes, seeds, progress bars.

Import this before torch, which reads how its threads wait when it is loaded.
"""
import argparse
import os
import signal
import sys
import time

# Waiting threads sleep instead of spinning: on a busy machine, spinning slows training severalfold.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

def report(kind, error, traceback):
    """Reports an uncaught exception as Python does, but Ctrl-C in one line."""
    if kind is KeyboardInterrupt:
        return print("\ninterrupted", file=sys.stderr)
    sys.__excepthook__(kind, error, traceback)

sys.excepthook = report  # before the slow imports, which Ctrl-C may interrupt too

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
from tqdm import tqdm

if hasattr(sys.stdout, "reconfigure"):
    sys.stdout.reconfigure(errors="backslashreplace")  # escapes letters that the terminal lacks

def parser(doc, **options):
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

def pick_device(name="auto", index=0):
    """Returns the torch.device of this name, or the best there is; index chooses among GPUs."""
    if name == "auto":
        name = ("cuda" if torch.cuda.is_available() else
                "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(f"cuda:{index}" if name == "cuda" else name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises a different one for each kind of device
        sys.exit(f"device = {name}: not usable here ({str(error).splitlines()[0][:80]}); "
                 "use cpu, cuda or mps")
    return device

def precision(device, bf16=True):
    """Returns torch.bfloat16 if it is wanted and this device multiplies it fast, else float32."""
    if device.type == "cpu":
        fast = ((torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
                and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    else:
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bf16 and fast else torch.float32

def autocast(device, bf16=True):
    """A context in which matrix products run in the device's precision."""
    enabled = precision(device, bf16) == torch.bfloat16
    # Without its cache: a weight that was cast in a pass without gradient would have none later.
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

def cast_matrices(model, dtype):
    """Converts the matrices of a frozen network once; autocast would do so in every pass."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(dtype)

def compile_blocks(blocks, device):
    """Compiles equal blocks, which share one graph; says so where there is no compiler."""
    try:
        torch.compile(lambda a: a * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # a missing compiler fails in a different way on each system
        return print0(f"torch.compile does not work here ({type(error).__name__}); running without")
    if device.type == "cpu":  # recompute what is cheap in the backward pass, to save memory
        torch._functorch.config.activation_memory_budget = 0.8
    for block in blocks:
        block.compile(dynamic=False)

def bench(step, count, tokens, device, bf16):
    """Prints the median time of step(), tokens/s, and its share of the rate of matrix products."""
    from torch.utils.flop_counter import FlopCounterMode
    times = [seconds(step, device) for _ in progress(range(count + 2), disable=rank() > 0)]
    median = float(np.median(times[2:]))  # the first two compile
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        import resource  # not on Windows
        unit = 1 if sys.platform == "darwin" else 1024
        memory = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        step()
    a = torch.randn(1024, 1024, device=device).to(precision(device, bf16))
    rate = 2 * 1024**3 / min(seconds(lambda: a @ a, device) for _ in range(100))
    share = world_size() * counter.get_total_flops() / median / rate
    print0(f"median step {1000 * median:,.0f} ms, {tokens / median:,.0f} tokens/s, peak memory "
           f"{memory / 1e9:.1f} GB, {share:.0%} of the matrix rate of {rate / 1e9:,.0f} GFLOP/s")

def seconds(action, device):
    """Returns how long action() takes, to the end of its work on the device."""
    start = time.perf_counter()
    action()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start

# ---- processes, randomness, progress -------------------------------------------------------------

def start_processes(device):
    """Joins the processes that torchrun started, if it did."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

def rank():
    return dist.get_rank() if dist.is_initialized() else 0

def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1

def print0(text):
    if rank() == 0:
        print(text, flush=True)

def max_over_processes(value):
    """Returns the largest of all processes' whole numbers; waits for them, but not for a GPU."""
    largest = torch.tensor(int(value))
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)

class StopSignal:
    """Notes Ctrl-C or kill in `seen`, so that a step can end. A second one ends at once."""

    def __init__(self):
        self.seen = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number, _):
        self.seen = True
        signal.signal(number, signal.SIG_DFL)

def seeded(*numbers, device="cpu"):
    """Returns a random generator of its own for (seed, row), (seed, step, rank), ..."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    return torch.Generator(device).manual_seed(seed)

def progress(*args, **options):
    """A tqdm bar: redrawn in place on a terminal, a line every half minute in a file."""
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(*args, smoothing=0.05, mininterval=interval, dynamic_ncols=True, **options)
