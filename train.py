"""
Trains ELF: flow matching in the embedding space of a frozen encoder, and cross-entropy at t = 1 (Alg. 1, 3 and 4).

    python train.py                                             # config/docs.py: offline, minutes on a laptop
    python train.py config/docs.py --steps=500 --batch_size 32  # any setting below, by --key=value or --key value
    torchrun --nproc_per_node=8 train.py config/owt_b.py        # the paper's ELF-B

A run lives in out/<name>: ckpt_<step>.pt (the newest few), best.pt (the best by validation) and log.jsonl. The same command goes on
where a run stopped, however that was, and ends with the same weights; --fresh moves the old run aside and starts anew.
"""
import copy
import difflib
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from data.rows import batch_rows, open_data, stand_ins
from model import (ELF, PREFIX, ROOT, VERSION, ELFConfig, autocast, checkpoints, condition_mask, embed, load, load_encoder, load_tokenizer,
                   pick_device, read)
from sample import conditions, sample, seeded, to_text

try:
    import fcntl
    import resource
except ImportError:  # Windows: two runs into one folder are then not noticed, nor how much memory there is in use
    fcntl = resource = None


@dataclass
class Config:
    # the run and its data
    name: str = "docs"             # the run's folder is <out>/<name>
    out: str = "out"
    data: str = "data/docs"        # a folder with train.bin, val.bin and meta.json
    prepare: str = ""              # the script that makes that folder, run when it is missing
    encoder: str = "t5-small"      # folder or Hugging Face repo id of the frozen T5; its tokenizer lies beside it
    length: int = 1024             # L, tokens a row
    cond_length: int = 0           # the condition's share of L at most; data of pairs only
    init_from: str = ""            # start from these weights: run, file or Hugging Face repo id
    # the network (Tab. 3)
    depth: int = 12
    dim: int = 768
    heads: int = 12
    bottleneck: int = 128
    # the method (Tab. 4)
    decode_share: float = 0.2      # of the rows: decode
    self_cond_share: float = 0.4   # of the rows: denoise with self-condition and guidance; the rest: plain denoise
    t_mean: float = -1.5           # time is sigmoid(N(t_mean, t_std^2))
    t_std: float = 0.8
    noise_scale: float = 2.0
    w_min: float = 0.5             # guidance scales, log-uniform in 1 + w
    w_max: float = 5.0
    decode_mean: float = 0.8       # decode rows keep a share sigmoid(N(decode_mean, decode_std^2)) of each embedding
    decode_std: float = 0.8
    decode_noise: float = 5.0      # 1 for conditional tasks
    cond_drop: float = 0.1         # of the rows with a condition: it is hidden, so that sampling can guide by it
    # sampling, unless sample.py is told otherwise
    sample_steps: int = 32
    sample_gamma: float = 1.5
    sample_w: float = 3.0
    sample_cfg: float = 1.0
    # optimisation
    steps: int = 95_000
    batch_size: int = 512          # rows a step, over all processes
    accum: int = 1                 # micro-batches a step in each process
    lr: float = 0.002              # 0.001 x batch_size / 256
    warmup: int = 9_500            # steps; then constant
    clip: float = 1.0              # of the gradient's norm
    ema: float = 0.9999            # of the weights; less in the first steps
    seed: int = 0
    # bookkeeping, in steps
    log_interval: int = 10
    val_interval: int = 1000
    val_rows: int = 256
    sample_interval: int = 5000
    sample_rows: int = 4
    save_interval: int = 1000
    save_minutes: float = 10.0     # and whenever so many have passed
    keep: int = 2                  # checkpoints, besides best.pt
    fresh: bool = False            # start anew; a run that is there is moved aside. As an option: --fresh
    # machine
    device: str = "auto"           # cuda, mps or cpu
    bf16: bool = True              # where the device is good at it
    compile: bool = True           # where there is a compiler
    recompute: bool = False        # activations, block by block, in the backward pass: less memory, more work
    bench: int = 0                 # only so many steps, on random tokens with a random encoder; nothing is read or saved


# ---------------------------------------------------------------------------------------------------------------------
# the two losses

def kinds(B, cfg):
    """How many of B rows decode and how many self-condition; the others are plain. Kinds go by position: rows are shuffled."""
    n_dec, n_sc = round(B * cfg.decode_share), round(B * cfg.self_cond_share)
    if min(n_dec, n_sc, B - n_dec - n_sc) < 1:
        sys.exit(f"{B} rows a micro-batch: too few for decode_share = {cfg.decode_share:g} and self_cond_share = {cfg.self_cond_share:g}; "
                 f"they would be {n_dec} decode, {n_sc} self-conditioned, {B - n_dec - n_sc} plain rows, and each kind needs one")
    return n_dec, n_sc


def draw(B, L, E, n_dec, cfg, rng):
    """Everything random in one step but `drop`: t (B,), w (B,), eps (B, L, E) at unit scale, p (n_dec, L, 1)."""
    def normal(*shape):
        return torch.randn(*shape, generator=rng, device=rng.device)
    u = torch.rand(B, generator=rng, device=rng.device)
    return dict(t=torch.sigmoid(cfg.t_mean + cfg.t_std * normal(B)),
                w=(1 + cfg.w_min) * ((1 + cfg.w_max) / (1 + cfg.w_min)) ** u - 1,         # log-uniform in 1 + w
                eps=normal(B, L, E),
                p=torch.sigmoid(cfg.decode_mean + cfg.decode_std * normal(n_dec, L, 1)))


def losses(model, x, ids, cond, n_dec, n_sc, t, w, eps, p, noise_scale, decode_noise):
    """
    Per-row losses of one batch (Alg. 1): rows [0, n_dec) decode, the next n_sc self-condition, the rest are plain.

    x     (B, L, E)       clean embeddings; 0 where a condition is dropped
    ids   (B, L)          their tokens
    cond  (B, L, 1) bool  the positions of a condition: denoising leaves them clean, and no loss counts there
    t, w, eps, p          as in `draw`
    returns  mse (B - n_dec,) on the velocity, ce (n_dec,) of the tokens: means over each row's target
    """
    t = torch.cat([torch.ones_like(t[:n_dec]), t[n_dec:]])
    t_ = t[n_dec:, None, None]
    z = torch.cat([p * x[:n_dec] + (1 - p) * decode_noise * eps[:n_dec],                  # decode: each token its own noise
                   t_ * x[n_dec:] + (1 - t_) * noise_scale * eps[n_dec:]])                # denoise: z_t = t x + (1 - t) eps
    clean = cond & (torch.arange(len(x), device=x.device) >= n_dec)[:, None, None]        # where z and x_sc hold the condition
    z, x_sc = torch.where(clean, x, z), torch.where(clean, x, 0.0)
    sc = slice(n_dec, n_dec + n_sc)
    if n_sc:
        with torch.no_grad():                                                             # a first guess, without self-condition
            x_u = getattr(model, "module", model)(z[sc], x_sc[sc], t[sc], w[sc])[0].float()
        x_sc = torch.cat([x_sc[:n_dec], torch.where(cond[sc], x[sc], x_u), x_sc[n_dec + n_sc:]])

    x_pred, logits = model(z, x_sc, t, w, n_dec)

    c = (1 - t_).clamp(min=0.05)
    v_pred, v = (x_pred.float() - z[n_dec:]) / c, (x[n_dec:] - z[n_dec:]) / c             # Eq. 1
    if n_sc:                                                                              # Eq. 3: guidance, trained in
        v_u = (x_u - z[sc]) / c[:n_sc]
        guided = v[:n_sc] + (1 - 1 / w[sc, None, None]) * (v_pred[:n_sc].detach() - v_u)
        v = torch.cat([guided, v[n_sc:]])
    mse = (v_pred - v).square().mean(2)                                                   # (B - n_dec, L)
    ce = F.cross_entropy(logits.float().transpose(1, 2), ids[:n_dec], reduction="none")   # Eq. 2, (n_dec, L)
    target = ~cond[..., 0]
    return mean(mse, target[n_dec:], 1), mean(ce, target[:n_dec], 1)


def mean(values, counts, dim=None):
    return (values * counts).sum(dim) / counts.sum(dim)


def objective(mse, ce, n_target, n_sc, cfg):
    """
    0.2 CE + 0.4 MSE (self-conditioned) + 0.4 MSE (plain): shares, not row counts, so rounding does not change it.
    n_target (B,): how many positions each row's loss stands for; each of the three is a mean over all those of its rows.
    """
    n_dec, plain_share = len(ce), 1 - cfg.decode_share - cfg.self_cond_share
    n_ce, n_mse = n_target[:n_dec], n_target[n_dec:]
    return (cfg.decode_share * mean(ce, n_ce) + cfg.self_cond_share * mean(mse[:n_sc], n_mse[:n_sc])
            + plain_share * mean(mse[n_sc:], n_mse[n_sc:]))


# ---------------------------------------------------------------------------------------------------------------------
# the optimisers

def orthogonal(G):
    """
    The matrices G (n, rows, columns), each with its singular values brought near 1: five Newton-Schulz steps in bfloat16.

    A step is X <- Q X with Q = a + b A + c A^2, A = X X^T, and Q X has the A of Q A Q. So three steps, then two, are first multiplied
    together as the small square matrices they are, and only their product P meets X: a quarter less work than step by step for the
    matrices of a block. All five at once would lose bfloat16's few digits.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # the paper's
    X = G.bfloat16()
    X = X.mT if X.shape[1] > X.shape[2] else X
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)

    def polynomial(A):
        Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
        Q.diagonal(dim1=1, dim2=2).add_(a)
        return Q

    for steps in (3, 2):
        A = X @ X.mT
        P = Q = polynomial(A)
        for _ in range(steps - 1):
            A = Q @ A @ Q
            Q = polynomial(A)
            P = Q @ P
        X = P @ X
    return X.mT if G.shape[1] > G.shape[2] else X


def newton_schulz_work(p):
    """Floating-point operations of `orthogonal` on one matrix of p's shape."""
    m, n = sorted(p.shape)
    return 8 * m**2 * n + 28 * m**3


class Muon(torch.optim.Optimizer):
    """
    Nesterov momentum, made orthogonal; matrices of one shape are worked on together. Each process of several works on its share of the
    matrices, and all receive all updates. A matrix that is taller than wide moves sqrt(rows / columns) further.
    """

    def __init__(self, params, lr, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.shares = [[] for _ in range(world)]  # the numbers of each process' matrices; the largest are dealt first
        params, load = self.param_groups[0]["params"], [0] * world
        for i in sorted(range(len(params)), key=lambda i: (newton_schulz_work(params[i]), params[i].shape), reverse=True):
            least = load.index(min(load))
            self.shares[least].append(i)
            load[least] += newton_schulz_work(params[i])

    @torch.no_grad()
    def step(self):
        [group] = self.param_groups
        params, grads = group["params"], [p.grad for p in group["params"]]
        momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov, in the gradients' own memory
        updates = torch.zeros(sum(p.numel() for p in params), dtype=torch.bfloat16, device=params[0].device)
        views = [v.view_as(p) for v, p in zip(updates.split([p.numel() for p in params]), params)]
        for _, same in itertools.groupby(self.shares[self.rank], key=lambda i: params[i].shape):  # sorted so
            same = list(same)
            torch._foreach_copy_([views[i] for i in same], list(orthogonal(torch.stack([grads[i] for i in same]))))
        if len(self.shares) > 1:
            dist.all_reduce(updates)  # every matrix is 0 in all processes but one
        for p, update in zip(params, views):
            p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def optimizers(model, cfg):
    """Muon on every 2-D weight, the unembedding included; Adam on biases, norms and control tokens."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [Muon(matrices, cfg.lr), torch.optim.Adam(rest, lr=cfg.lr, fused=True)]


# ---------------------------------------------------------------------------------------------------------------------
# the loop

def main(argv=None):
    """Trains as the settings in argv say, under torchrun as one of several processes; SystemExit with one line if it cannot go on."""
    cfg = configure(sys.argv[1:] if argv is None else argv)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = pick_device(cfg.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, signal.default_int_handler))
        failed = train(cfg, device, world, rank, stack)
    if world > 1:  # train has let go of DDP, which holds it: the other way round, gloo's thread and this one may wait for each other
        dist.destroy_process_group()
    if failed:
        sys.exit(failed if rank == 0 else 1)


def train(cfg, device, world, rank, stack):
    """The run itself; what it holds goes on the stack. Returns None, or the line that says why it failed."""
    cfg = replace(cfg, steps=cfg.bench or cfg.steps)
    B = cfg.batch_size // (world * cfg.accum)  # rows a micro-batch
    if B * world * cfg.accum != cfg.batch_size:
        sys.exit(f"batch_size = {cfg.batch_size}: not a multiple of {world} processes x accum = {cfg.accum}")
    n_dec, n_sc = kinds(B, cfg)
    say = print if rank == 0 else lambda text: None

    if rank == 0 and not cfg.bench:
        open_data(cfg.data, cfg.length, cfg.cond_length, cfg.encoder, cfg.prepare)  # may prepare it
    if world > 1:
        dist.barrier()
    if cfg.bench:
        say(f"bench: random tokens, and a random encoder of the shape of {cfg.encoder}")
        train_rows, val_rows, meta, tokenizer, encoder = stand_ins(cfg.encoder, cfg.length, cfg.cond_length)
        encoder.to(device)
    else:
        train_rows, val_rows, meta = open_data(cfg.data, cfg.length, cfg.cond_length, cfg.encoder)
        tokenizer, encoder = load_tokenizer(cfg.encoder), load_encoder(cfg.encoder, device)
    x_mean, x_std = (torch.tensor(meta[k], device=device) for k in ("x_mean", "x_std"))  # numbers, or one per channel
    if x_mean.numel() not in (1, encoder.config.d_model):
        sys.exit(f"{cfg.data}/meta.json: x_mean has {x_mean.numel()} channels, encoder {cfg.encoder} has {encoder.config.d_model}; prepare it again")
    torch.manual_seed(cfg.seed)
    elf_config = ELFConfig(cfg.depth, cfg.dim, cfg.heads, encoder.config.d_model, len(tokenizer), cfg.bottleneck)
    raw = ELF(elf_config).to(device)
    params, ema = list(raw.parameters()), [p.detach().clone() for p in raw.parameters()]
    opts = optimizers(raw, cfg)
    settings = asdict(cfg) | {k: meta[k] for k in ("x_mean", "x_std", "fingerprint")}

    run = ROOT / cfg.out / cfg.name
    log = run / "log.jsonl"
    if rank == 0 and not cfg.bench:
        stack.enter_context(alone(run, cfg.fresh))
    if world > 1:
        dist.barrier()

    def agree(value):
        """The greatest of all processes' values, on the CPU: no wait for the GPU."""
        flag = torch.tensor(int(value))
        if world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag)

    machine = dict(processes=world, device=device.type)
    start, best = (0, np.inf) if cfg.bench else restore(run, settings, machine, raw, ema, opts, say)
    if agree(start) != -agree(-start):
        sys.exit(f"{run}: not the same on all machines; choose an --out that they share")
    if start >= cfg.steps:
        say(f"{run}: finished at step {start}; more --steps go on from there, --fresh or another --name starts anew")
        sys.exit()
    if rank == 0 and not cfg.bench:
        forget(log, start)
    if not start and cfg.init_from:
        other, _ = load(cfg.init_from, device)
        if differ := [f"{k} {getattr(other.config, k)}, here {v}" for k, v in asdict(elf_config).items() if getattr(other.config, k) != v]:
            sys.exit(f"init_from = {cfg.init_from}: a network of other sizes ({'; '.join(differ)}); set these to fit")
        raw.load_state_dict(other.state_dict())
        torch._foreach_copy_(ema, [p.detach() for p in params])
    # Compiling costs half a minute, which shorter runs do not earn back. A resumed run compiles as its first part did, to end as one.
    raw.recompute, clock = cfg.recompute, Clock(device, raw)
    if cfg.compile and (cfg.steps >= 500 or cfg.bench) and compiler_works(device):
        for block in raw.blocks:  # one block is compiled and serves them all: as fast as the whole, in half of the start-up time
            block.compile(dynamic=False)
    net = DistributedDataParallel(raw) if world > 1 else raw

    def batch_losses(model, rows, rng):
        """`losses` of some rows, and their n_target: encode (the encoder is frozen), draw the noise, run the network."""
        ids, n_cond = rows
        if ids.max() >= len(tokenizer):
            sys.exit(f"{cfg.data}: token id {ids.max()} in it, but {cfg.encoder} has {len(tokenizer)} tokens; prepare the data for this encoder")
        ids, n_cond = torch.from_numpy(ids).to(device), torch.from_numpy(n_cond).to(device)
        clock.lap("data")
        cond = condition_mask(n_cond, cfg.length)
        with autocast(device, cfg.bf16):
            if meta["pairs"]:
                drop = torch.rand(B, generator=rng, device=device) < cfg.cond_drop
                x = embed(encoder, ids, x_mean, x_std, cond, drop)
            else:
                x = embed(encoder, ids, x_mean, x_std)
            clock.lap("encoder")
            mse, ce = losses(model, x, ids, cond, n_dec, n_sc, **draw(*x.shape, n_dec, cfg, rng),
                             noise_scale=cfg.noise_scale, decode_noise=cfg.decode_noise)
        return mse, ce, cfg.length - n_cond

    def swap_ema():
        for p, e in zip(params, ema):
            p.data, e.data = e.data, p.data

    @torch.no_grad()
    def validate():
        """MSE of the plain rows and CE, of the EMA weights, on the same rows with the same noise every time."""
        total, count = np.zeros(2), -(-min(cfg.val_rows, len(val_rows)) // B)
        for i in range(count):
            mse, ce, n = batch_losses(raw, val_rows.batch(np.arange(i * B, (i + 1) * B) % len(val_rows)), seeded(1234, i, device=device))
            total += [mean(mse[n_sc:], n[n_dec + n_sc:]).item(), mean(ce, n[:n_dec]).item()]
        return dict(zip(("val_mse", "val_ce"), (total / count).round(5).tolist()))

    def show_samples():
        """A few samples; of pairs: those of the first validation rows, as `condition -> sample | target`."""
        how = dict(steps=cfg.sample_steps, gamma=cfg.sample_gamma, w=cfg.sample_w, cfg=cfg.sample_cfg, seed=cfg.seed, noise_scale=cfg.noise_scale)
        if not meta["pairs"]:
            return [to_text(tokenizer, row) for row in sample(raw, cfg.sample_rows, cfg.length, **how)]
        ids, n_cond = val_rows.batch(range(min(cfg.sample_rows, len(val_rows))))
        _, condition = conditions(encoder, [row[:n] for row, n in zip(ids, n_cond)], settings, device)
        tokens = sample(raw, len(ids), cfg.length, **how, condition=condition)
        return [f"{to_text(tokenizer, real[:n])} -> {to_text(tokenizer, row, n)} | {to_text(tokenizer, real, n)}"
                for real, row, n in zip(ids, tokens, n_cond)]

    done, caught = start, []

    def on_signal(number, _):
        if done == start and world == 1:
            raise KeyboardInterrupt  # nothing to save yet, and the first step may take long: it compiles
        caught.append(number)        # the step is finished first
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    say(f"{sum(p.numel() for p in params):,} parameters, {len(train_rows):,} training rows of {cfg.length} "
        f"({meta['fingerprint']}), {cfg.steps} steps of {cfg.batch_size} rows, {device.type}" + f", from step {start} on" * (start > 0))
    bar = stack.enter_context(tqdm(total=cfg.steps, initial=start, disable=rank > 0, dynamic_ncols=True))
    since, since_step, saved_at, saved = time.monotonic(), start, time.monotonic(), start
    bad = torch.zeros((), dtype=torch.int64, device=device)  # the first step whose gradient is not finite: the same in all processes
    for step in range(start, cfg.steps):
        if step - start >= 2 and (cfg.bench or step % cfg.log_interval == 0):  # the first two compile, and fill caches
            clock.start()
        rows = batch_rows(len(train_rows), step, cfg.batch_size, cfg.seed)
        for micro in range(cfg.accum):
            first = (rank * cfg.accum + micro) * B
            with net.no_sync() if world > 1 and micro < cfg.accum - 1 else nullcontext():
                mse, ce, n = batch_losses(net, train_rows.batch(rows[first:first + B]), seeded(cfg.seed, step, rank, micro, device=device))
                (objective(mse, ce, n, n_sc, cfg) / cfg.accum).backward()
                clock.lap("gradient")
        norm = torch.nn.utils.clip_grad_norm_(params, cfg.clip)
        done, last = step + 1, step + 1 == cfg.steps
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = cfg.lr * min(1, done / max(1, cfg.warmup))
            opt.step()
            opt.zero_grad()
        torch._foreach_lerp_(ema, [p.detach() for p in params], 1 - min(cfg.ema, done / (done + 9)))
        clock.lap("optimiser")
        clock.stop()
        bad = torch.where((bad == 0) & ~norm.isfinite(), done, bad)
        bar.update()
        if cfg.bench:
            continue

        word = agree(2 if caught else time.monotonic() - saved_at > 60 * cfg.save_minutes)  # 2: stop, 1: save, 0: go on
        logging, saving = done % cfg.log_interval == 0 or last, done % cfg.save_interval == 0 or last or word > 0
        if (logging or saving) and bad:
            return (f"loss or gradient is not finite at step {int(bad)}; it was not saved, the checkpoints before it are kept: "
                    "try a smaller --lr or a longer --warmup")
        entry, better = {}, False
        if rank == 0 and logging:
            rate = (done - since_step) * cfg.batch_size * cfg.length / (time.monotonic() - since)
            since, since_step = time.monotonic(), done
            entry = dict(loss=objective(mse, ce, n, n_sc, cfg).item(), mse=mse.mean().item(), ce=ce.mean().item(), tokens_per_s=rate)
            bar.set_postfix_str(f"loss {entry['loss']:.3f} mse {entry['mse']:.3f} ce {entry['ce']:.3f} {rate:,.0f} tok/s")
        if rank == 0 and (done % cfg.val_interval == 0 or last):
            swap_ema()
            entry |= validate()
            swap_ema()
            bar.write(f"step {done}: val mse {entry['val_mse']:.4f}, val ce {entry['val_ce']:.4f}")
            val = 0.8 * entry["val_mse"] + 0.2 * entry["val_ce"]
            better = val < best
        if rank == 0 and (done % cfg.sample_interval == 0 or last):
            swap_ema()
            entry["samples"] = show_samples()
            swap_ema()
            bar.write("\n".join(f"  | {text}" for text in entry["samples"]))
        try:
            if entry:
                note(log, dict(step=done) | entry)
            if rank == 0 and (saving or better):
                content = dict(version=VERSION, elf_config=asdict(elf_config), settings=settings, machine=machine, step=done,
                               best=val if better else best, model=raw.state_dict(), ema=dict(zip(raw.state_dict(), ema)),
                               optimizers=[o.state_dict() for o in opts])
                save(run / f"ckpt_{done:08}.pt", content, cfg.keep, better)
                saved, best = done, content["best"]
        except (OSError, RuntimeError) as e:  # RuntimeError is torch.save's way to say that the disk is full
            unsaved = f"step {done}: not saved ({' '.join(str(e).split())[:100]}); what was saved before is kept: free some disk space"
            bar.write(f"{unsaved}; the next save tries again")
        if saving:
            saved_at = time.monotonic()
        if word == 2:
            break
    if clock.steps:
        work = matrix_work(raw, encoder, B, cfg.length, n_dec, n_sc, cfg.accum)
        bar.close()
        say(clock.report(cfg.batch_size * cfg.length, work * world, cfg.bf16))
    if cfg.bench:
        return None
    if rank == 0 and saved < done:
        return f"{unsaved}; the same command goes on from step {saved}"
    if done < cfg.steps:
        bar.close()
        say(f"stopped after step {done}, which is saved; the same command goes on from there")


# ---------------------------------------------------------------------------------------------------------------------
# settings: a file, then options

FREE = {"name", "out", "prepare", "init_from", "steps", "sample_steps", "sample_gamma", "sample_w", "sample_cfg", "log_interval",
        "val_interval", "val_rows", "sample_interval", "sample_rows", "save_interval", "save_minutes", "keep", "fresh", "device", "bf16",
        "compile", "recompute", "bench"}  # settings that a resumed run may change


def configure(argv):
    """Config from `[FILE.py] [--key=value | --key value]...`; SystemExit with one line on anything else."""
    argv = [f"{arg}=true" if arg in ("--fresh", "--recompute") else arg for arg in argv]
    if {"-h", "--help"} & set(argv):
        print(__doc__, "Settings, with their defaults:", *(f"  --{f.name}={f.default}" for f in fields(Config)), sep="\n")
        sys.exit()
    file = Path(argv.pop(0)) if argv and not argv[0].startswith("-") else ROOT / "config" / "docs.py"
    file = file if file.is_file() else ROOT / file
    if not file.is_file():
        sys.exit(f"{file}: no such config file; there are: {', '.join(sorted(f'config/{f.name}' for f in ROOT.glob('config/*.py')))}")
    try:
        given = {k: v for k, v in runpy.run_path(str(file)).items() if not k.startswith("_")}
    except Exception as e:
        sys.exit(f"{file}: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
    types = {f.name: f.type for f in fields(Config)}
    for arg in (args := iter(argv)):
        key, eq, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            sys.exit(f"{arg}: expected --key=value")
        key = key.replace("-", "_")
        if not eq and (text := next(args, None)) is None:
            sys.exit(f"--{key}: has no value; write --{key}=value")
        given[key] = parse(key, text, types.get(key))
    for key, value in given.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, 1)
            sys.exit(f"{key}: no such setting" + (f"; did you mean {near[0]}?" if near else "; train.py lists them in Config"))
        if types[key] is float and type(value) is int and abs(value) < 1e12:
            given[key] = float(value)
        elif type(value) is not types[key]:
            sys.exit(f"{key} = {value!r}: must be {types[key].__name__}, not {type(value).__name__}")
    cfg = Config(**given)
    for key, value in asdict(cfg).items():
        if types[key] in (int, float):
            low = -100 if key in ("t_mean", "decode_mean") else 0
            zero = key in ("seed", "warmup", "ema", "t_std", "decode_std", "decode_noise", "cond_length", "cond_drop", "sample_gamma", "sample_cfg", "bench")
            if not (low < value < 1e9 or value == 0 and zero):
                sys.exit(f"{key} = {value}: must be {'at least' if zero else 'greater than'} {low}, and below 1e9")
    if not re.fullmatch(r"\w[\w.-]{0,99}", cfg.name):
        sys.exit(f"name = {cfg.name!r}: must be a plain folder name of letters, digits, '.', '_' and '-'")
    if cfg.decode_share + cfg.self_cond_share >= 1:
        sys.exit(f"decode_share + self_cond_share = {cfg.decode_share + cfg.self_cond_share:g}: must leave room for plain rows, below 1")
    if cfg.ema >= 1 or cfg.w_max < cfg.w_min:
        sys.exit(f"ema = {cfg.ema}, w_min = {cfg.w_min}, w_max = {cfg.w_max}: ema must be below 1, w_max at least w_min")
    return cfg


def parse(key, text, kind):
    """The text of --key as `kind`; a key that does not exist keeps its text, and is refused later."""
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text.replace("_", "")) if kind in (int, float) else text
    except (ValueError, KeyError):
        sys.exit(f"--{key}={text}: must be {kind.__name__}")


# ---------------------------------------------------------------------------------------------------------------------
# surviving: one process to a folder, checkpoints that are whole or not there, a log without repeats

@contextmanager
def alone(run, fresh=False):
    """Holds the folder `run` for this process alone, and makes it; fresh: what was there is kept as <name>.old-1, -2, ..."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = open(run / ".lock", "a")
    except OSError as e:
        sys.exit(f"{run}: not a folder that can be written ({e.strerror}); choose another --out or --name")
    with lock:
        try:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except BlockingIOError:
            sys.exit(f"{run}: another process trains there; wait until it ends, or give this run another --name")
        except OSError as e:
            print(f"{run}: cannot be locked ({e.strerror}); see to it that no other process trains there")
        if fresh and os.listdir(run) != [".lock"]:
            old = next(old for n in itertools.count(1) if not (old := run.with_name(f"{run.name}.old-{n}")).exists())
            os.rename(run, old)
            print(f"{run}: the run that was there is now {old}")
            with alone(run):
                yield
        else:
            yield


def save(file, content, keep, best):
    """
    Writes the checkpoint `file` aside, to the disk itself, then renames it, so that under its name it is whole; also as best.pt, if
    it is the best; removes the oldest ones but `keep`. OSError or RuntimeError if it cannot (a full disk): all is then as it was.
    """
    temporary, link = file.with_name("ckpt.tmp"), file.with_name("best.tmp")
    try:
        for path in (temporary, link):
            path.unlink(missing_ok=True)  # never written over: after a kill, it may be best.pt under another name
        with open(temporary, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())
        if best:  # before the checkpoint: a run killed in between validates again, and comes back here
            try:
                os.link(temporary, link)
            except OSError:  # a file system without links
                shutil.copyfile(temporary, link)
            os.replace(link, file.with_name("best.pt"))
        os.replace(temporary, file)
    finally:
        for path in (temporary, link):
            path.unlink(missing_ok=True)
    for old in [f for f in checkpoints(file.parent) if f.name.startswith("ckpt_") and f.name <= file.name][keep:]:
        old.unlink()


def restore(run, settings, machine, model, ema, opts, say):
    """
    The newest whole checkpoint of the run into model, ema and opts. No random state is in it: noise is drawn from (seed, step, rank,
    micro-batch), the order of the data from (seed, epoch), so that the step alone says how both go on.

    machine   what settles the noise besides: if the checkpoint was made on another, that is said
    returns   (step, best validation loss so far); (0, inf) without a run
    raises    SystemExit if the run has other settings, or none of its checkpoints is whole
    """
    files = checkpoints(run) + list(run.glob("best.pt"))
    for file in files:
        try:
            old = read(file)
            step, best, before = int(old["step"]), float(old.get("best", np.inf)), old.get("machine", machine)
            free = FREE | ({"accum"} if before != machine else set())
            changed = [f"{k} {old['settings'].get(k)!r:.50} -> {v!r:.50}" for k, v in settings.items()
                       if k not in free and old["settings"].get(k) != v]
            if not changed:
                model.load_state_dict(old["model"])
                for e, name in zip(ema, model.state_dict(), strict=True):
                    e.copy_(old["ema"][name])
                for opt, state in zip(opts, copy.deepcopy(old["optimizers"]), strict=True):  # a copy, for `old` is the file itself
                    opt.load_state_dict(state)
        except Exception as e:  # a damaged or foreign file fails in as many ways as there are formats
            say(f"{file}: damaged, or not of train.py ({type(e).__name__}: {' '.join(str(e).split())[:60]}); trying the one before")
            continue
        if changed:
            sys.exit(f"{run}: holds a run with other settings ({', '.join(changed)}); give this one another --name, or move that one "
                     "aside with --fresh")
        if before != machine:
            say(f"{file}: from {before}, goes on with {machine}: the same weights and place in the data, but other noise from here on")
        return step, best
    if files:
        sys.exit(f"{run}: none of its {len(files)} checkpoints can be read; move it aside with --fresh, or give this run another --name")
    return 0, np.inf


def forget(log, step):
    """Drops from log.jsonl what comes again: the lines of steps after `step`, and one cut short by a kill."""
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    kept = [line for line in lines if (m := re.fullmatch(rb'\{"step": (\d+)\b.*\}\n', line)) and int(m[1]) <= step]
    if len(kept) < len(lines):
        log.with_suffix(".tmp").write_bytes(b"".join(kept))
        os.replace(log.with_suffix(".tmp"), log)


def note(log, entry):
    """One more line of log.jsonl, whole or not at all."""
    line = json.dumps(entry).encode() + b"\n"
    with open(log, "ab", buffering=0) as f:
        end = f.tell()
        if f.write(line) < len(line):
            f.truncate(end)
            raise OSError(f"{log}: the disk is full")


# ---------------------------------------------------------------------------------------------------------------------
# where the time goes

class Clock:
    """Where the time of a step goes. It runs in some of the steps only, for on a GPU it waits for the end of each part."""

    def __init__(self, device, model):
        self.device, self.parts, self.steps = device, None, []
        model.register_forward_pre_hook(lambda *_: None if torch.is_grad_enabled() else self.lap("gradient"))
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self.lap("no-grad"))

    def now(self):
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def start(self):
        self.parts, self.last = dict.fromkeys(("data", "encoder", "no-grad", "gradient", "optimiser"), 0.0), self.now()

    def lap(self, part):
        if self.parts is not None:
            before, self.last = self.last, self.now()
            self.parts[part] += self.last - before

    def stop(self):
        if self.parts is not None:
            self.steps.append(self.parts)
            self.parts = None

    def report(self, tokens, flops, bf16):
        """One line on the median step: of so many tokens and floating-point operations in matrix products."""
        step = float(np.median([sum(parts.values()) for parts in self.steps]))
        a, times = torch.randn(2048, 2048, device=self.device), []
        with autocast(self.device, bf16):
            a = a.to((a @ a).dtype)
        for _ in range(6):
            start = self.now()
            a @ a
            times.append(self.now() - start)
        peak = 2 * 2048**3 / min(times)
        memory = (torch.cuda.max_memory_allocated() if self.device.type == "cuda" else
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) if resource else 0)
        shares = ", ".join(f"{part} {np.median([parts[part] for parts in self.steps]) / step:.0%}" for part in self.steps[0])
        return (f"median step {1000 * step:,.0f} ms, {tokens / step:,.0f} tokens/s; matrix products {flops / 1e9:,.0f} GFLOP, "
                f"{flops / step / peak:.0%} of the {peak / 1e9:,.0f} GFLOP/s measured here; peak memory {memory / 1e9:.1f} GB; {shares}")


def matrix_work(model, encoder, B, L, n_dec, n_sc, accum):
    """Floating-point operations in a step's matrix products: the encoder, both passes (a backward is two forwards), Newton-Schulz."""
    c, e, P = model.config, encoder.config, L + PREFIX

    def size(*modules):
        return sum(p.numel() for module in modules for p in module.parameters() if p.ndim == 2)

    trunk = 2 * L * size(model.in_proj, model.bottleneck) + 2 * P * size(model.blocks) + 4 * c.depth * P**2 * c.dim  # one row, forward
    denoise, unembed = 2 * L * size(model.denoise), 2 * L * size(model.unembed)
    frozen = B * (2 * L * size(encoder.encoder.block) + 4 * e.num_layers * L**2 * e.num_heads * e.d_kv)
    passes = n_sc * (trunk + denoise) + 3 * (B * trunk + (B - n_dec) * denoise + n_dec * unembed)
    return accum * (frozen + passes) + sum(newton_schulz_work(p) for p in model.parameters() if p.ndim == 2)


def compiler_works(device):
    """Tries torch.compile on one line; where it fails (no C++ compiler, say), training runs eagerly and says so."""
    try:
        torch.compile(lambda a: a * 2 + 1)(torch.ones(8, device=device))
        return True
    except Exception as e:
        print(f"torch.compile does not work here ({type(e).__name__}: {str(e).splitlines()[0][:80]}): running eagerly")
        return False


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped before a step was done; the same command starts again", flush=True)
        os._exit(0)  # whatever it was at: threads of torch.compile, a download, ...
