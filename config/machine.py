"""
The machine a run is on: its device and what that is good at, its console, files that two processes want, the processes of torchrun, the
signals that end a run, and a stopwatch.
"""
import errno
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
from tqdm import tqdm

from model import PREFIX

try:
    import fcntl
    import resource
except ImportError:  # Windows: two runs into one folder are then not noticed, nor how much memory there is in use
    fcntl = resource = None


# ---------------------------------------------------------------------------------------------------------------------
# the device

def pick_device(name="auto", index=0):
    """torch.device by name, or the best there is; `index` picks among several GPUs where the name does not."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if not re.fullmatch(r"(cpu|mps|cuda(:\d+)?)", name):
            raise ValueError("no such device")
        device = torch.device(f"cuda:{index}" if name == "cuda" else name)
        torch.empty(1, device=device)
    except Exception as e:
        sys.exit(f"device = {name}: not usable here ({str(e).splitlines()[0][:80]}); use cpu, cuda or mps")
    return device


def precision(device, bf16=True):
    """torch.bfloat16 where it is wanted and the device multiplies it fast: recent GPUs, CPUs with AVX512-BF16 or AMX. Else torch.float32."""
    if device.type == "cpu":  # what the processor has, and its library makes use of
        fast = (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()) and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bf16 and fast else torch.float32


def autocast(device, bf16=True):
    """Matrix products in the device's precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision(device, bf16) == torch.bfloat16)


def describe(device, bf16, compiled):
    """What a run's noise (processes, device) and its rounding (all of it) depend on besides its seed: equal ones end with equal bits."""
    return dict(processes=world_size(), device=device.type, threads=torch.get_num_threads(), torch=str(torch.__version__),
                kernels=torch.backends.cpu.get_cpu_capability(), bf16=bf16, compiled=compiled)


def compile_blocks(blocks, device):
    """
    Compiles the blocks of a network, which share one graph: as fast as the whole, in half of the start-up time. Says so where there is no
    compiler. On a CPU their backward has attention's scores, and what else is cheap, again: much less memory for 3 % of a block's time.
    """
    try:
        torch.compile(lambda a: a * 2 + 1)(torch.ones(8, device=device))
    except Exception as e:
        print0(f"torch.compile does not work here ({type(e).__name__}: {str(e).splitlines()[0][:80]}): running eagerly")
        return False
    if device.type == "cpu":
        torch._functorch.config.activation_memory_budget = 0.8  # of what it would keep
    for block in blocks:
        block.compile(dynamic=False)
    return True


def cast_matrices(model, dtype):
    """Those of a network that is not trained, once for all: autocast would cast them at every pass."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(dtype)


def ready_to_sample(model, device, positions):
    """For passes over so many positions in all: the matrices cast, and the blocks compiled where it is minutes of work, which earn that back."""
    cast_matrices(model, precision(device))
    work = 2 * positions * sum(param.numel() for param in model.parameters())
    if work > (5e13 if device.type == "cpu" else 5e16):
        compile_blocks(model.blocks, device)


# ---------------------------------------------------------------------------------------------------------------------
# the console, and files that two processes want

class Console:
    """
    A stream that cannot end a run: letters it lacks are escaped; where its reader has left (| head, a closed terminal), or there is none,
    text is lost. On a full disk it ends the program, and says so.
    """

    def __init__(self, stream):
        self.stream = stream or open(os.devnull, "w")
        self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as e:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if e.errno not in (errno.EPIPE, errno.EIO):
                sys.exit(f"the output cannot be written ({e.strerror})")


def run_program(main, interrupted="interrupted"):
    """main(), whose output cannot end it, and which Ctrl-C ends with one line."""
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr, flush=True)
        os._exit(130)  # whatever it was at: threads of torch.compile, a download, ...


def run_script(command, patience=3):
    """The exit code of another Python program; on Ctrl-C it has some seconds to end by itself, before it is told to and waited for."""
    process = subprocess.Popen([sys.executable, *map(str, command)])
    try:
        return process.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches the child too; a signal to this process alone does not
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
        raise


class Lines:
    """A bar's file where there is no terminal: of all that it would draw, a line every half minute, and the last."""

    def __init__(self):
        self.next, self.text = time.monotonic() + 30, ""

    def write(self, text):
        ended, self.text = text == "\n", text.strip("\r\n ") or self.text
        if ended or time.monotonic() >= self.next:
            self.next = time.monotonic() + 30
            print(self.text, file=sys.stderr, flush=True)

    def flush(self):
        pass


def progress(*args, **how):
    """A tqdm bar; without a terminal, lines."""
    return tqdm(*args, smoothing=0.05, **how, **dict(dynamic_ncols=True) if sys.stderr.isatty() else dict(file=Lines(), ncols=120))


@contextmanager
def hold(file, when_busy):
    """
    Holds the lock `file`, which is there only meanwhile, for this process alone, however that ends. Where another process holds it,
    when_busy() ends the program, or says that it will wait.
    """
    if fcntl is None:
        yield
        return
    while True:
        lock = open(file, "a")
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                when_busy()
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as e:  # a file system without locks
            print(f"{file}: cannot be locked ({e.strerror}); see to it that no other process works there", file=sys.stderr)
        if file.exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(file)):
            break  # else its holder has just removed it
        lock.close()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.close()


# ---------------------------------------------------------------------------------------------------------------------
# the processes: one, or those that torchrun started

def upload(array, device):
    """A numpy array as a tensor there; to a GPU from pinned memory, so that the program goes on while it is copied."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier():
    if dist.is_initialized():
        dist.barrier()


def print0(text):
    """Prints in the first process only."""
    if rank() == 0:
        print(text, flush=True)


def max_over_processes(value):
    """The greatest of all processes' whole numbers, on the CPU: no wait for the GPU."""
    greatest = torch.tensor(int(value))
    if dist.is_initialized():
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return int(greatest)


def seeded(*numbers, device="cpu"):
    """A generator of its own for (seed, row), (seed, step, rank), ..."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Ctrl-C, kill, a closed terminal


class StopSignal:
    """
    These signals, within a `with`. As long as there is nothing to finish they raise KeyboardInterrupt; once `finish_step` is set they
    only set `seen`, for the loop to end after the step it is in, and a second Ctrl-C ends the process at once.
    """

    def __init__(self):
        self.finish_step = self.seen = False

    def __enter__(self):
        self.before = {number: signal.signal(number, self.handle) for number in STOPPING
                       if signal.getsignal(number) is not signal.SIG_IGN}  # nohup
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number, _):
        if not self.finish_step:
            raise KeyboardInterrupt
        self.seen = True
        if signal.SIGINT in self.before:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


# ---------------------------------------------------------------------------------------------------------------------
# where the time goes

class Clock:
    """
    Where the time of a step goes: of the one after each logged step (on a GPU it waits for the end of each part), of all with --bench; not of
    the first two, which compile and fill caches. Hooks on encoder and network tell the parts that the loop does not.
    """

    def __init__(self, model, data, config, step):
        self.model, self.encoder, self.config, self.device = model, data.encoder, config, data.encoder.device
        self.first, self.asked, self.parts, self.steps = step + 2, (time.monotonic(), step), None, []
        self.hooks = [self.encoder.encoder.embed_tokens.register_forward_pre_hook(lambda *_: self.lap("data")),
                      self.encoder.encoder.final_layer_norm.register_forward_hook(lambda *_: self.lap("encoder"))]
        for network in filter(None, (model, data.teacher)):
            self.hooks += [network.register_forward_pre_hook(lambda *_: None if torch.is_grad_enabled() else self.lap("gradient")),
                           network.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self.lap("no-grad"))]

    def now(self):
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def start(self, step):
        if step >= self.first and (self.config.bench or step % self.config.log_interval == 0):
            self.parts, self.last = dict.fromkeys(("data", "encoder", "no-grad", "gradient", "optimiser"), 0.0), self.now()

    def lap(self, part):
        if self.parts is not None:
            before, self.last = self.last, self.now()
            self.parts[part] += self.last - before

    def stop(self, part):
        self.lap(part)
        if self.parts is not None:
            self.steps.append(self.parts)
            self.parts = None

    def rate(self, step):
        """Steps a second since this was last asked."""
        before, self.asked = self.asked, (time.monotonic(), step)
        return (step - before[1]) / (self.asked[0] - before[0])

    def report(self):
        """Prints one line on the median step, beside how fast one large matrix product is here; the hooks go, for encoder and teacher may live on."""
        for hook in self.hooks:
            hook.remove()
        if not self.steps:
            return
        step = float(np.median([sum(parts.values()) for parts in self.steps]))
        a, times = torch.randn(1024, 1024, device=self.device).to(precision(self.device, self.config.bf16)), []
        while sum(times) < 0.3 and len(times) < 300:
            start = self.now()
            a @ a
            times.append(self.now() - start)
        peak, flops = 2 * len(a)**3 / min(times), step_work(self.model, self.encoder, self.config)
        memory = (torch.cuda.max_memory_allocated() if self.device.type == "cuda" else
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) if resource else 0)
        shares = ", ".join(f"{part} {np.median([parts[part] for parts in self.steps]) / step:.0%}" for part in self.steps[0])
        print0(f"median step {1000 * step:,.0f} ms, {self.config.batch_size * self.config.length / step:,.0f} tokens/s; matrix products "
               f"{flops / 1e9:,.0f} GFLOP, {flops / step / peak:.0%} of the {peak / 1e9:,.0f} GFLOP/s measured here; peak memory "
               f"{memory / 1e9:.1f} GB; {shares}")


def step_work(model, encoder, config):
    """Floating-point operations in the matrix products of one optimiser step of all processes."""
    micro_batches, B = world_size() * config.accum, config.micro_batch(world_size())
    rows = matrix_work(model, encoder, B, config.length, round(B * config.decode_share), round(B * config.self_cond_share), config.teacher_substeps)
    return micro_batches * rows + sum(newton_schulz_work(param) for param in model.parameters() if param.ndim == 2)


def matrix_work(model, encoder, B, L, n_dec, n_sc, teacher_substeps=0):
    """
    Floating-point operations in the matrix products of one micro-batch: the encoder's on B rows, the network's on the n_sc that it sees
    twice, and three times its forward's (a backward is two) on all; a teacher's steps on all that denoise.
    """
    sizes, t5, P = model.config, encoder.config, L + PREFIX

    trunk = 2 * L * matrix_size(model.in_proj, model.bottleneck) + 2 * P * matrix_size(model.blocks) + 4 * sizes.depth * P**2 * sizes.dim
    denoise, unembed = 2 * L * matrix_size(model.denoise), 2 * L * matrix_size(model.unembed)  # these three for one row
    frozen = B * (2 * L * matrix_size(encoder.encoder.block) + 4 * t5.num_layers * L**2 * t5.num_heads * t5.d_kv)
    no_grad = (n_sc + (B - n_dec) * teacher_substeps) * (trunk + denoise)
    return frozen + no_grad + 3 * (B * trunk + (B - n_dec) * denoise + n_dec * unembed)


def matrix_size(*modules):
    return sum(param.numel() for module in modules for param in module.parameters() if param.ndim == 2)


def newton_schulz_work(matrix):
    """Floating-point operations of Muon's `orthogonal` on one matrix of this shape."""
    m, n = sorted(matrix.shape)
    return 8 * m**2 * n + 28 * m**3
