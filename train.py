"""
Trains ELF: flow matching in the embedding space of a frozen encoder, and cross-entropy at t = 1.

    python train.py                                          # config/docs.py, minutes on a laptop
    python train.py config/docs.py --steps=500 --lr 0.004    # --help lists all settings
    torchrun --nproc_per_node=8 train.py config/owt_b.py     # the paper's ELF-B

The run lies in out/<name>. The same command resumes it, however it was stopped, and ends with the
same weights.
"""
import runtime  # first: before torch
import functools
import json
import os
import sys
import time
from contextlib import nullcontext
from itertools import groupby
from operator import attrgetter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from config import configure
from data.encoder import condition_mask, embed
from data.rows import batch_rows, load_data, read_conditions
from model import velocity
from runtime import max_over_processes, print0, rank, seeded, world_size
from sample import sample_texts

# ---- the losses ----------------------------------------------------------------------------------

def split_rows(B, config):
    """Returns the slices of B shuffled rows that decode, denoise with x_sc, and denoise plainly."""
    n_decode, n_sc = round(B * config.decode_share), round(B * config.self_cond_share)
    if min(n_decode, n_sc, B - n_decode - n_sc) < 1:
        sys.exit(f"{B} rows in a micro-batch: too few for decode_share = {config.decode_share:g}, "
                 f"self_cond_share = {config.self_cond_share:g} and a plain row; raise batch_size")
    return slice(n_decode), slice(n_decode, n_decode + n_sc), slice(n_decode + n_sc, B)

def draw(B, L, E, n_decode, config, rng):
    """Draws scales w and times t (B,), noise eps (B, L, E), and x's share p (n_decode, L, 1)."""
    how = dict(generator=rng, device=rng.device)
    ratio = (1 + config.w_max) / (1 + config.w_min)
    w = (1 + config.w_min) * ratio ** torch.rand(B, **how) - 1                # log-uniform in 1 + w
    t = torch.sigmoid(config.t_mean + config.t_std * torch.randn(B, **how))
    eps = torch.randn(B, L, E, **how)
    p = torch.sigmoid(config.decode_mean + config.decode_std * torch.randn(n_decode, L, 1, **how))
    return dict(w=w, t=t, eps=eps, p=p)

def losses(model, x, ids, cond_mask, kinds, w, t, eps, p, noise_scale, decode_noise,
           teacher=None, times=None):
    """
    Returns the losses of one micro-batch (Alg. 1; its two branches are Alg. 3 and Alg. 4).

    x          (B, L, E)       clean embeddings, 0 where a condition is hidden
    ids        (B, L)          their tokens
    cond_mask  (B, L, 1) bool  positions of a condition: clean when denoising, and without a loss
    kinds, w, t, eps, p        from `split_rows` and `draw`; teacher, times: see `distilled_target`
    returns    (losses (rows, L), counted (rows, L) bool) of decode, self-conditioned, plain rows
    """
    dec, sc, plain = kinds
    den = slice(sc.start, plain.stop)                                       # all that denoise
    t = torch.cat([torch.ones_like(t[dec]), t[den]])                        # decode rows: t = 1
    t3 = t[:, None, None]                                                   # (B, 1, 1)
    z_dec = p * x[dec] + (1 - p) * decode_noise * eps[dec]                  # Alg. 4: a p per token
    z_den = t3[den] * x[den] + (1 - t3[den]) * noise_scale * eps[den]       # Alg. 3: a t per row
    z = torch.cat([z_dec, torch.where(cond_mask[den], x[den], z_den)])
    x_sc = torch.where(cond_mask, x, 0.0)
    x_sc[dec] = 0.0

    first_pass = teacher or getattr(model, "module", model)                 # past DDP: no backward
    with torch.no_grad():
        x_u = first_pass(z[sc], x_sc[sc], t[sc], w[sc])[0].float()          # Alg. 3: x_sc still 0
    x_sc[sc] = torch.where(cond_mask[sc], x[sc], x_u)
    x_pred, logits = model(z, x_sc, t, w, n_decode=dec.stop)                # both branches at once
    x_pred, logits, n_sc = x_pred.float(), logits.float(), len(x_u)

    ce = F.cross_entropy(logits.flatten(0, 1), ids[dec].flatten(), reduction="none")        # Eq. 2
    if teacher:
        x_target = distilled_target(teacher, z[den], x_sc[den], times[den], w[den], cond_mask[den])
        mse_sc, mse_plain = (x_pred - x_target).square().mean(2).tensor_split([n_sc])
    else:
        v = velocity(x[den], z[den], t3[den])
        v_pred = velocity(x_pred, z[den], t3[den])
        mse_plain = (v_pred[n_sc:] - v[n_sc:]).square().mean(2)                             # Eq. 1
        # If v_pred equals its target, then v_pred = v_u + w (v - v_u): guidance of scale w, with
        # self-conditioning as the condition.
        v_u = velocity(x_u, z[sc], t3[sc])
        target = v[:n_sc] + (1 - 1 / w[sc, None, None]) * (v_pred[:n_sc].detach() - v_u)    # Eq. 3
        mse_sc = (v_pred[:n_sc] - target).square().mean(2)
    counted = ~cond_mask[..., 0]
    return (ce.view_as(ids[dec]), counted[dec]), (mse_sc, counted[sc]), (mse_plain, counted[plain])

def masked_mean(values, counted):
    return (values * counted).sum() / counted.sum()

def objective(parts, config):
    """Returns CE and the MSEs of self-conditioned and plain rows, weighted 0.2, 0.4 and 0.4."""
    shares = [config.decode_share, config.self_cond_share]
    return sum(share * masked_mean(*part) for share, part in zip([*shares, 1 - sum(shares)], parts))

def batch_losses(model, data, rows, rng, config):
    """Encodes rows, as `Rows.batch` returns them, draws the noise, and returns `losses`."""
    ids, n_cond = (torch.from_numpy(y).to(rng.device, non_blocking=True) for y in rows)
    kinds, cond_mask = split_rows(len(ids), config), condition_mask(n_cond, config.length)
    masks = ()
    if config.cond_length:  # hide the condition of a share of the rows
        masks = cond_mask, torch.rand(len(ids), generator=rng, device=rng.device) < config.cond_drop
    with runtime.autocast(rng.device, config.bf16):
        x = embed(data.encoder, ids, data.x_mean, data.x_std, *masks)
        drawn = draw(*x.shape, kinds[0].stop, config, rng)
        if data.teacher:
            drawn["times"] = student_times(drawn["t"], config, rng)
            drawn["t"] = drawn["times"][:, 0]
        return losses(model, x, ids, cond_mask, kinds, **drawn, noise_scale=config.noise_scale,
                      decode_noise=config.decode_noise, teacher=data.teacher)

# ---- progressive distillation: one step of the student ends where several of its teacher end -----

def student_times(t, config, rng):
    """
    Returns times (B, K + 1) of the teacher's K steps within one student step of 1/student_steps.

    The step begins at (1 - 1/student_steps) t; the times within it are logit-normal, like t (B,).
    """
    span, K = 1 / config.student_steps, config.teacher_substeps
    normal = torch.randn(len(t), K - 1, generator=rng, device=rng.device)
    inner = torch.sigmoid(config.t_mean + config.t_std * normal).sort().values
    places = F.pad(F.pad(inner, (1, 0)), (0, 1), value=1.0)                  # from 0 to 1
    return (1 - span) * t[:, None] + span * places

@torch.no_grad()
def distilled_target(teacher, z, x_sc, times, w, cond_mask):
    """
    Returns the x_pred (B, L, E) with which one Euler step of the student, from z at times[:, 0] to
    times[:, -1], ends where the teacher's K steps end. The teacher begins with the same x_sc.
    """
    z_end = z
    for t, t_next in zip(times.mT, times.mT[1:]):
        x_pred = teacher(z_end, x_sc, t, w)[0].float()
        move = (t_next - t)[:, None, None] * velocity(x_pred, z_end, t[:, None, None])
        z_end = torch.where(cond_mask, z, z_end + move)
        x_sc = torch.where(cond_mask, x_sc, x_pred)
    start, end = times[:, 0, None, None], times[:, -1, None, None]
    return z + (1 - start) / (end - start) * (z_end - z)

# ---- the optimisers ------------------------------------------------------------------------------

def orthogonal(G):
    """
    Moves the singular values of matrices G (n, rows, columns) to near 1: 5 Newton-Schulz steps.

    A step is X <- Q X with Q = a + b A + c A^2 and A = X X^T; the A of the new X is Q A Q. So
    three steps, then two, are first multiplied as small squares, and only their product P meets X.
    """
    tall = G.shape[1] > G.shape[2]
    X = G.mT if tall else G
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for count in (3, 2):  # all five at once would lose bfloat16's few digits
        A = X @ X.mT
        P = Q = polynomial(A)
        for _ in range(count - 1):
            A = Q @ A @ Q
            Q = polynomial(A)
            P = Q @ P
        X = P @ X
    return X.mT if tall else X

def polynomial(A, a=3.4445, b=-4.7750, c=2.0315):
    """Returns a + b A + c A^2 of symmetric A (n, m, m); the coefficients are the paper's."""
    Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
    Q.diagonal(dim1=1, dim2=2).add_(a)
    return Q

class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, for 2-D weights (Tab. 4); processes share the work."""

    def __init__(self, params, lr, momentum=0.95, dtype=torch.bfloat16):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.dtype = dtype  # of the Newton-Schulz steps
        for param in self.param_groups[0]["params"]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self):
        [group] = self.param_groups
        grads = [param.grad for param in group["params"]]
        momenta = [self.state[param]["momentum_buffer"] for param in group["params"]]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov, in their memory
        by_shape = groupby(sorted(group["params"], key=attrgetter("shape")), attrgetter("shape"))
        for number, (shape, params) in enumerate(by_shape):
            params = list(params)
            stacked = torch.stack([param.grad.to(self.dtype) for param in params])
            mine = slice((rank() + number) % world_size(), None, world_size())
            updates = orthogonal(stacked[mine])
            if world_size() > 1:
                stacked.zero_()[mine] = updates
                dist.all_reduce(stacked)  # each matrix is 0 in all processes but one
                updates = stacked
            rate = group["lr"] * max(1, shape[0] / shape[1]) ** 0.5
            for param, update in zip(params, updates):
                param.add_(update, alpha=-rate)

def make_optimizers(model, config):
    """Returns Muon for 2-D weights and Adam for the rest; or AdamW for all, to compare."""
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), config.lr, (0.9, 0.95), weight_decay=0.0)]
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim != 2]
    dtype = runtime.precision(rest[0].device, config.bf16)
    return [Muon(matrices, config.lr, dtype=dtype), torch.optim.Adam(rest, config.lr, fused=True)]

# ---- the loop ------------------------------------------------------------------------------------

def train_step(net, state, data, config):
    """
    Takes one optimiser step, on the mean gradient of all micro-batches, and updates the average.

    returns  loss, mse and ce of this process's last micro-batch, and the gradient's norm
    """
    params, B = list(state.model.parameters()), config.micro_batch(world_size())
    order = batch_rows(len(data.train), state.step, config.batch_size, config.seed)
    for micro in range(config.accum):
        first = (rank() * config.accum + micro) * B
        rng = seeded(config.seed, state.step, rank(), micro, device=params[0].device)
        last = micro == config.accum - 1
        with nullcontext() if last or world_size() == 1 else net.no_sync():
            parts = batch_losses(net, data, data.train.batch(order[first:first + B]), rng, config)
            loss = objective(parts, config)
            (loss / config.accum).backward()
    norm = torch.nn.utils.clip_grad_norm_(params, config.clip)
    state.step += 1  # from here on, the number of steps done
    left = (config.steps + 1 - state.step) / max(1, config.cooldown * config.steps)
    rate = config.lr * min(1, state.step / max(1, config.warmup), left)
    for optimizer in state.optimizers:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        decay = min(config.ema, state.step / (state.step + 9))
        torch._foreach_lerp_(list(state.ema.parameters()), params, 1 - decay)
    ce, *mse = parts
    mse = masked_mean(*map(torch.cat, zip(*mse)))  # of both kinds of rows
    return dict(loss=loss.detach(), mse=mse.detach(), ce=masked_mean(*ce).detach()), norm

def train(state, data, config):
    """Takes the steps that are left; logs, validates, samples and saves when these are due."""
    net = DistributedDataParallel(state.model) if world_size() > 1 else state.model
    one_step = functools.partial(train_step, net, state, data, config)
    if config.bench:
        return runtime.bench(one_step, config.bench, config.batch_size * config.length,
                             data.encoder.device, config.bf16)
    finite, stopping, saved = True, False, time.monotonic()
    bar = runtime.progress(total=config.steps, initial=state.step, disable=rank() > 0)
    stop = runtime.StopSignal()
    with bar:
        while state.step < config.steps and not stopping:
            figures, norm = one_step()
            bar.update()
            finite = norm.isfinite() & finite  # on the device: no step waits for it
            stopping = max_over_processes(stop.seen) > 0
            overdue = time.monotonic() - saved > 60 * config.save_minutes
            saving = stopping or overdue or config.is_due("save", state.step)
            if (saving or config.is_due("log", state.step)) and not finite:
                sys.exit(f"step {state.step}: the gradient is not finite; earlier checkpoints are "
                         "kept: try a smaller --lr or a longer --warmup")
            if rank() == 0:
                observe(state, data, config, figures, bar)
            if saving:
                saved = time.monotonic()
                checkpoint.save(state, config.keep)
    if stopping:
        print0(f"stopped after step {state.step}, which is saved; the same command resumes there")

def observe(state, data, config, figures, bar):
    """Appends to log.jsonl what is due after this step: losses, validation, samples."""
    entry = {}
    if config.is_due("log", state.step):
        entry = {name: value.item() for name, value in figures.items()}
        bar.set_postfix({name: f"{value:.3f}" for name, value in entry.items()}, refresh=False)
    if config.is_due("val", state.step):
        entry |= validate(state.ema, data, config)
        bar.write(f"step {state.step}: val mse {entry['val_mse']:.4f}, ce {entry['val_ce']:.4f}")
    if config.is_due("sample", state.step):
        source = "val" if config.cond_length else None
        conds, records = read_conditions(source, config.sample_rows, state.settings, data.tokenizer)
        texts = sample_texts(state.ema, state.settings, data.tokenizer, conds, data.encoder)
        entry["samples"] = [record | dict(text=text) for record, text in zip(records, texts)]
        bar.write("\n".join(f"  | {' | '.join(each.values())}" for each in entry["samples"]))
    if entry:
        with open(state.folder / "log.jsonl", "a") as log:
            log.write(json.dumps(dict(step=state.step) | entry) + "\n")

@torch.no_grad()
def validate(model, data, config):
    """Returns MSE (plain rows) and CE on even validation rows, with the same noise every time."""
    B, even = config.micro_batch(world_size()), -(-len(data.val) // 2)
    total, count = torch.zeros(2), -(-min(config.val_rows, even) // B)
    for i in range(count):
        rows = data.val.batch([2 * (place % even) for place in range(i * B, (i + 1) * B)])
        rng = seeded(1234, i, device=data.encoder.device)
        ce, _, plain = batch_losses(model, data, rows, rng, config)
        total += torch.stack([masked_mean(*plain), masked_mean(*ce)]).cpu()
    return dict(zip(("val_mse", "val_ce"), (total / count).tolist()))

def main(argv=None):
    config = configure(sys.argv[1:] if argv is None else argv, __doc__)
    device = runtime.pick_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    runtime.start_processes(device)
    split_rows(config.micro_batch(world_size()), config)  # now, not after minutes of preparation
    data = load_data(config, device)
    state = checkpoint.new_state(config, data, device, make_optimizers)  # and data.teacher
    print0(f"{sum(param.numel() for param in state.model.parameters()):,} parameters, "
           f"{len(data.train):,} rows of {config.length} tokens, {config.steps} steps of "
           f"{config.batch_size} rows, {device.type}")
    with nullcontext() if config.bench else checkpoint.open_run(state, config.fresh):
        train(state, data, config)
    if dist.is_initialized():
        dist.destroy_process_group()
    elif state.step < config.steps and not config.bench:
        sys.exit(130)  # as after Ctrl-C, so that `&&` goes no further

if __name__ == "__main__":
    main()
