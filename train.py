"""
Trains ELF: flow matching in the embedding space of a frozen encoder, and cross-entropy at t = 1 (Alg. 1, 3 and 4).

    python train.py                                             # config/docs.py: offline, minutes on a laptop
    python train.py config/docs.py --steps=500 --batch_size 32  # any setting of config/__init__.py, by --key=value or --key value
    torchrun --nproc_per_node=8 train.py config/owt_b.py        # the paper's ELF-B

A run lives in out/<name>: ckpt_<step>.pt (the newest few), best.pt (the best by validation) and log.jsonl. The same command goes on
where a run stopped, however it was stopped, and ends with the same weights; --fresh moves the old run aside and starts anew.
"""
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from config import ROOT, configure, sampling  # first: it sets how torch's threads wait

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from checkpoint import begin, load_teacher, locked, record
from config.machine import (Clock, StopSignal, autocast, barrier, max_over_processes, pick_device, precision, print0, progress, rank,
                            run_program, seeded, upload, world_size)
from data.encoder import condition_mask, embed, load_data, random_gaps, to_text
from data.rows import batch_rows
from model import velocity
from sample import sample_texts


# ---------------------------------------------------------------------------------------------------------------------
# the losses

def split_rows(B, config):
    """B rows as three slices, by position since rows are shuffled: decode, self-conditioned and plain denoise rows."""
    n_decode, n_sc = round(B * config.decode_share), round(B * config.self_cond_share)
    if min(n_decode, n_sc, B - n_decode - n_sc) < 1:
        sys.exit(f"{B} rows a micro-batch: too few for decode_share = {config.decode_share:g} and self_cond_share = {config.self_cond_share:g}; "
                 f"they would be {n_decode} decode, {n_sc} self-conditioned, {B - n_decode - n_sc} plain rows, and each kind needs one")
    return slice(0, n_decode), slice(n_decode, n_decode + n_sc), slice(n_decode + n_sc, B)


def draw(B, L, E, n_decode, config, rng):
    """
    What is random in a micro-batch, but for dropped conditions and gaps: t (B,), w (B,), eps (B, L, E) at unit scale, p (n_decode, L, 1). For
    a student also times (B, K + 1): of the teacher's K = teacher_substeps steps from t, where the student's step begins, to its end.
    """
    how = dict(generator=rng, device=rng.device)
    w = (1 + config.w_min) * ((1 + config.w_max) / (1 + config.w_min)) ** torch.rand(B, **how) - 1    # log-uniform in 1 + w
    t = torch.sigmoid(config.t_mean + config.t_std * torch.randn(B, **how))
    eps = torch.randn(B, L, E, **how)
    p = torch.sigmoid(config.decode_mean + config.decode_std * torch.randn(n_decode, L, 1, **how))
    if not config.student_steps:
        return dict(t=t, w=w, eps=eps, p=p)
    span, K = 1 / config.student_steps, config.teacher_substeps
    inner = torch.sigmoid(config.t_mean + config.t_std * torch.randn(B, K - 1, **how)).sort().values
    places = torch.cat([torch.zeros(B, 1, device=rng.device), inner, torch.ones(B, 1, device=rng.device)], dim=1)
    t = (1 - span) * t
    return dict(t=t, w=w, eps=eps, p=p, times=t[:, None] + span * places)


@torch.no_grad()
def distilled_target(teacher, z, x_sc, times, w, cond_mask):
    """
    The x_pred with which one Euler step of the student from z ends where the teacher's K steps end (progressive distillation).

    z, x_sc   (B, L, E)    what the student sees, and the teacher's first step; its others see its own last x_pred
    times     (B, K + 1)   of the teacher's steps: the first is that of z, the last that of the student's step's end
    """
    z_end = z
    for t, t_next in zip(times.mT, times.mT[1:]):
        x_pred = teacher(z_end, x_sc, t, w)[0].float()
        z_end = torch.where(cond_mask, z, z_end + (t_next - t)[:, None, None] * velocity(x_pred, z_end, t[:, None, None]))
        x_sc = torch.where(cond_mask, x_sc, x_pred)
    start, end = times[:, 0, None, None], times[:, -1, None, None]
    return z + (1 - start) / (end - start) * (z_end - z)


def losses(model, x, ids, cond_mask, kinds, t, w, eps, p, noise_scale, decode_noise, times=None, teacher=None):
    """
    The losses of one micro-batch, token by token: Alg. 1, of which Alg. 3 (denoise) and Alg. 4 (decode) are the two branches.

    x          (B, L, E)       clean embeddings; 0 where a condition is dropped (see `batch_losses`)
    ids        (B, L)          their tokens
    cond_mask  (B, L, 1) bool  the positions of a condition: denoising leaves them clean, and no loss counts there
    kinds      the slices dec, sc and plain of the batch, as from `split_rows`
    t, w, eps, p, times        as from `draw`
    teacher    for a student: the frozen network whose steps it learns to take at once
    returns    for dec, sc and plain rows, a loss (rows, L) and where it counts (rows, L) bool
    """
    dec, sc, plain = kinds
    den = slice(sc.start, plain.stop)                                                       # denoise: sc and plain
    t = torch.cat([torch.ones_like(t[dec]), t[den]])                                        # decode rows are at t = 1
    t3 = t[:, None, None]                                                                   # broadcasts to (B, L, E)
    z_dec = p * x[dec] + (1 - p) * decode_noise * eps[dec]                                  # Alg. 4: each token its own p
    z_den = t3[den] * x[den] + (1 - t3[den]) * noise_scale * eps[den]                       # Alg. 3: each row its own t
    z = torch.cat([z_dec, torch.where(cond_mask[den], x[den], z_den)])                      # a condition stays clean in z
    x_sc = torch.where(cond_mask, x, 0.0)                                                   # and in x_sc
    x_sc[dec] = 0.0                                                                         # decode rows have no x_sc

    guesser = teacher or getattr(model, "module", model)                                    # without DDP's wrapper: no backward follows
    with torch.no_grad():
        x_u = guesser(z[sc], x_sc[sc], t[sc], w[sc])[0].float()                             # Alg. 3: a first guess, without x_sc
    x_sc[sc] = torch.where(cond_mask[sc], x[sc], x_u)

    x_pred, logits = model(z, x_sc, t, w, n_decode=dec.stop)                                # one forward for both branches
    ce = F.cross_entropy(logits.float().flatten(0, 1), ids[dec].flatten(), reduction="none").view_as(ids[dec])    # Eq. 2
    counted = ~cond_mask[..., 0]

    if teacher:
        target = distilled_target(teacher, z[den], x_sc[den], times[den], w[den], cond_mask[den])
        mse_sc, mse_plain = (x_pred.float() - target).square().mean(2).tensor_split([len(x_u)])
        return (ce, counted[dec]), (mse_sc, counted[sc]), (mse_plain, counted[plain])

    x_pred_sc, x_pred_plain = x_pred.float().tensor_split([len(x_u)])
    v = velocity(x[plain], z[plain], t3[plain])
    v_pred = velocity(x_pred_plain, z[plain], t3[plain])
    mse_plain = (v_pred - v).square().mean(2)                                               # Eq. 1

    v = velocity(x[sc], z[sc], t3[sc])
    v_u = velocity(x_u, z[sc], t3[sc])
    v_pred = velocity(x_pred_sc, z[sc], t3[sc])
    # If v_pred reaches this target, v_pred = v_u + w (v - v_u): guidance of scale w, with the network's own first guess as the
    # condition that plain text lacks.
    target = v + (1 - 1 / w[sc, None, None]) * (v_pred.detach() - v_u)                      # Eq. 3
    mse_sc = (v_pred - target).square().mean(2)
    return (ce, counted[dec]), (mse_sc, counted[sc]), (mse_plain, counted[plain])


def masked_mean(values, counted):
    return (values * counted).sum() / counted.sum()


def objective(parts, config):
    """
    0.2 CE + 0.4 MSE (sc) + 0.4 MSE (plain) of what `losses` returns, each a mean over all positions of the micro-batch that count: fixed
    shares, so that rounding the numbers of rows does not change it.
    """
    shares = config.decode_share, config.self_cond_share, 1 - config.decode_share - config.self_cond_share
    return sum(share * masked_mean(*part) for share, part in zip(shares, parts))


def batch_losses(model, data, rows, rng, config):
    """`losses` of rows as `Rows.batch` gives them: encode (the encoder is frozen), draw the noise, run the network (Alg. 1)."""
    ids, n_cond = (upload(array, rng.device) for array in rows)
    kinds = split_rows(len(ids), config)
    cond_mask = condition_mask(n_cond, config.length)
    with autocast(rng.device, config.bf16):
        if config.cond_length:
            drop = torch.rand(len(ids), generator=rng, device=rng.device) < config.cond_drop
            x = embed(data.encoder, ids, data.x_mean, data.x_std, cond_mask, drop)
        elif config.gap_share:
            cond_mask = random_gaps(len(ids), config.length, config.gap_share, rng)
            x = embed(data.encoder, ids, data.x_mean, data.x_std, cond_mask)
        else:
            x = embed(data.encoder, ids, data.x_mean, data.x_std)
        B, L, E = x.shape
        return losses(model, x, ids, cond_mask, kinds, **draw(B, L, E, kinds[0].stop, config, rng),
                      noise_scale=config.noise_scale, decode_noise=config.decode_noise, teacher=data.teacher)


# ---------------------------------------------------------------------------------------------------------------------
# the optimisers

def orthogonal(G):
    """
    The matrices G (n, rows, columns), each with its singular values brought near 1: five Newton-Schulz steps in G's precision.

    A step is X <- Q X with Q = a + b A + c A^2, A = X X^T, and the A of the new X is Q A Q. So three steps, then two, are first multiplied
    together as the small square matrices they are, and only their product P meets X: a quarter less work than step by step for the
    matrices of a block. All five at once would lose bfloat16's few digits.
    """
    X = G.mT if G.shape[1] > G.shape[2] else G
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for steps in (3, 2):
        A = X @ X.mT
        P = Q = polynomial(A)
        for _ in range(steps - 1):
            A = Q @ A @ Q
            Q = polynomial(A)
            P = Q @ P
        X = P @ X
    return X.mT if G.shape[1] > G.shape[2] else X


def polynomial(A, a=3.4445, b=-4.7750, c=2.0315):
    """a + b A + c A^2 of the symmetric matrices A (n, m, m); the coefficients are the paper's."""
    Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
    Q.diagonal(dim1=1, dim2=2).add_(a)
    return Q


class Muon(torch.optim.Optimizer):
    """
    Nesterov momentum, made orthogonal; matrices of one shape are worked on together. Of several processes each works on its share of them,
    and all receive all updates. A matrix that is taller than wide moves sqrt(rows / columns) further.
    """

    def __init__(self, params, lr, momentum=0.95, dtype=torch.bfloat16):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.dtype = dtype  # of the Newton-Schulz steps
        for param in self.param_groups[0]["params"]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self):
        [group] = self.param_groups
        params, grads = group["params"], [param.grad for param in group["params"]]
        momenta = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov, in the gradients' own memory
        for number, (shape, same) in enumerate(groupby(sorted(params, key=attrgetter("shape")), key=attrgetter("shape"))):
            same = list(same)
            stacked = torch.stack([param.grad.to(self.dtype) for param in same])
            mine = slice((rank() + number) % world_size(), None, world_size())  # shifted by number: single matrices go round
            updates = orthogonal(stacked[mine])
            if world_size() > 1:
                stacked.zero_()[mine] = updates
                dist.all_reduce(stacked)  # every matrix is 0 in all processes but one
                updates = stacked
            for param, update in zip(same, updates):
                param.add_(update, alpha=-group["lr"] * max(1, shape[0] / shape[1]) ** 0.5)


def optimizers(model, config):
    """Muon on every 2-D weight, the unembedding included; Adam on biases, norms and control tokens. Or, to compare, AdamW on all."""
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim != 2]
    return [Muon(matrices, config.lr, dtype=precision(matrices[0].device, config.bf16)), torch.optim.Adam(rest, lr=config.lr, fused=True)]


# ---------------------------------------------------------------------------------------------------------------------
# the loop

def train_step(net, state, data, config, clock):
    """
    One optimiser step: the mean gradient of all micro-batches, clipped; Muon and Adam; the moving average of the weights.
    returns   loss, mse and ce of this process' last micro-batch, and the norm of the gradient
    """
    clock.start(state.step)
    params = list(state.model.parameters())
    B = config.micro_batch(world_size())
    order = batch_rows(len(data.train), state.step, config.batch_size, config.seed)
    for micro in range(config.accum):
        first = (rank() * config.accum + micro) * B
        rng = seeded(config.seed, state.step, rank(), micro, device=params[0].device)
        with net.no_sync() if world_size() > 1 and micro < config.accum - 1 else nullcontext():
            parts = batch_losses(net, data, data.train.batch(order[first:first + B]), rng, config)
            loss = objective(parts, config)
            (loss / config.accum).backward()
        clock.lap("gradient")
    norm = torch.nn.utils.clip_grad_norm_(params, config.clip)
    state.step += 1
    left = config.steps + 1 - state.step
    for opt in state.optimizers:
        opt.param_groups[0]["lr"] = config.lr * min(1, state.step / max(1, config.warmup), left / max(1, config.cooldown * config.steps))
        opt.step()
        opt.zero_grad()
    decay = min(config.ema, state.step / (state.step + 9))  # (1 + n) / (10 + n) after n steps before this one
    torch._foreach_lerp_(state.ema, [param.detach() for param in params], 1 - decay)
    clock.stop("optimiser")
    ce, sc, plain = parts
    mse = map(torch.cat, zip(sc, plain))
    return dict(loss=loss.detach(), mse=masked_mean(*mse).detach(), ce=masked_mean(*ce).detach()), norm


def train(state, data, config, stop):
    """The steps that are left. Returns None, or the line that says why the run failed."""
    if state.step >= config.steps:
        return print0(f"{state.folder}: finished at step {state.step}; more --steps go on from there, --fresh or another --name starts anew")
    net = DistributedDataParallel(state.model) if world_size() > 1 else state.model
    clock = Clock(state.model, data, config, state.step)
    bad_step = torch.zeros((), dtype=torch.int64, device=data.encoder.device)  # the first whose gradient is not finite, in all processes
    saved_step, saved_at, unsaved = state.step, time.monotonic(), ""
    stop.finish_step = world_size() > 1 and not config.bench  # alone, until the first step is done, there is nothing to save: Ctrl-C just ends
    with progress(total=config.steps, initial=state.step, disable=rank() > 0) as bar:
        while state.step < config.steps:
            figures, norm = train_step(net, state, data, config, clock)
            bad_step = torch.where((bad_step == 0) & ~norm.isfinite(), state.step, bad_step)
            bar.update()
            if config.bench:
                continue
            stop.finish_step = True
            asked = max_over_processes(2 if stop.seen else time.monotonic() - saved_at > 60 * config.save_minutes)  # 2: to stop, 1: to save
            saving = asked > 0 or config.is_due("save", state.step)
            if (saving or config.is_due("log", state.step)) and bad_step:
                return (f"loss or gradient is not finite at step {int(bad_step)}; it was not saved, the checkpoints before it are kept: "
                        f"try a smaller --lr or a longer --warmup, with --change to go on from the last one")
            if rank() == 0:
                entry = observe(state, data, config, figures, clock, bar)
                try:
                    if record(state, entry, saving, config.keep):
                        saved_step = state.step
                except (OSError, RuntimeError) as e:
                    unsaved = f"step {state.step}: not saved ({' '.join(str(e).split())[:100]}); what was saved before is kept: free some disk space"
                    bar.write(f"{unsaved}; the next save tries again")
            if saving:
                saved_at = time.monotonic()
            if asked == 2:
                break
    clock.report()
    if rank() == 0 and saved_step < state.step and not config.bench:
        return f"{unsaved}; the same command goes on from step {saved_step}"
    if state.step < config.steps:
        print0(f"stopped after step {state.step}, which is saved; the same command goes on from there")


def main(argv=None):
    """Trains as the settings in argv say, under torchrun as one of several processes; SystemExit with one line if it cannot go on."""
    config = configure(sys.argv[1:] if argv is None else argv, __doc__)
    config = replace(config, steps=config.bench or config.steps)
    device = pick_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    split_rows(config.micro_batch(world_size()), config)  # too few rows are found out now, not after minutes of preparation
    with StopSignal() as stop:
        data = load_data(config, device)
        if config.teacher:
            data.teacher = load_teacher(config, data)
        for run in config.in_rounds():
            folder = ROOT / run.out / run.name
            with locked(folder) if rank() == 0 and not run.bench else nullcontext():
                barrier()
                state = begin(run, data, folder, optimizers)
                failed = train(state, data, run, stop)
            if failed or state.step < run.steps:  # asked to stop
                break
    if dist.is_initialized():  # train has let go of DDP, which holds it: the other way round, gloo's thread and this one may wait for each other
        dist.destroy_process_group()
    if failed:
        sys.exit(failed if rank() == 0 else 1)
    if stop.seen and "RANK" not in os.environ:
        sys.exit(130)  # so that what stands after it and && does not begin; torchrun would take it for a failure


# ---------------------------------------------------------------------------------------------------------------------
# what the loop asks now and then

def observe(state, data, config, figures, clock, bar):
    """What is due after this step, for the log: its losses and the speed, the losses on validation rows, samples; {} where nothing is."""
    entry = {}
    if config.is_due("log", state.step):
        entry = {name: value.item() for name, value in figures.items()}
        entry["tokens_per_s"] = rate = clock.rate(state.step) * config.batch_size * config.length
        bar.set_postfix_str(f"loss {entry['loss']:.3f} mse {entry['mse']:.3f} ce {entry['ce']:.3f} {rate:,.0f} tok/s", refresh=False)
    if config.is_due("val", state.step):
        with state.averaged() as model:
            entry |= validate(model, data, config)
        bar.write(f"step {state.step}: val mse {entry['val_mse']:.4f}, val ce {entry['val_ce']:.4f}")
    if config.is_due("sample", state.step):
        with state.averaged() as model:
            entry["samples"] = show_samples(model, data, state.settings)
        bar.write("\n".join(f"  | {text}" for text in entry["samples"]))
    return entry


@torch.no_grad()
def validate(model, data, config):
    """CE of the decode rows among some validation rows, MSE of the plain ones: the same rows with the same noise every time."""
    B = config.micro_batch(world_size())
    total, count = np.zeros(2), -(-min(config.val_rows, len(data.val)) // B)
    for i in range(count):
        rows = data.val.batch(2 * np.arange(i * B, (i + 1) * B) % len(data.val))  # even rows: eval.py reads the odd
        ce, _, mse_plain = batch_losses(model, data, rows, seeded(1234, i, device=data.encoder.device), config)
        total += [masked_mean(*mse_plain).item(), masked_mean(*ce).item()]
    return dict(zip(("val_mse", "val_ce"), (total / count).round(5).tolist()))


def show_samples(model, data, settings):
    """A few samples; of pairs: those of the first validation rows, as `condition -> sample | target`."""
    how = {name: settings[f"sample_{name}"] for name in sampling.PAPER} | dict(seed=settings["seed"])
    if not settings["cond_length"]:
        return sample_texts(model, settings, data.tokenizer, settings["sample_rows"], **how)
    rows = [(row[:n], row[n:]) for row, n in zip(*data.val.batch(range(min(settings["sample_rows"], len(data.val)))))]
    texts = sample_texts(model, settings, data.tokenizer, conditions=[condition for condition, _ in rows], encoder=data.encoder, **how)
    return [f"{to_text(data.tokenizer, condition)} -> {text} | {to_text(data.tokenizer, target)}" for (condition, target), text in zip(rows, texts)]


if __name__ == "__main__":
    run_program(main, "stopped, and nothing new saved; the same command starts there again")
