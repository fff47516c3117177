"""
Trains ELF: flow matching in the embedding space of a frozen encoder, and cross-entropy at t = 1.

    python train.py                                             # config/docs.py, minutes on a laptop
    python train.py config/docs.py --steps=500 --batch_size 32  # --help lists all settings
    torchrun --nproc_per_node=8 train.py config/owt_b.py        # the paper's ELF-B

The run lies in out/<name>. The same command resumes it, however it was stopped, and ends with the
same weights; --fresh moves the old run aside and starts anew.
"""
import runtime  # first: before torch
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
from runtime import print0, rank, seeded, world_size
from sample import sample_texts


# ---------------------------------------------------------------------------------------------------
# the losses

def split_rows(B, config):
    """Returns the slices of B shuffled rows that decode, denoise with x_sc, and denoise plainly."""
    n_decode, n_sc = round(B * config.decode_share), round(B * config.self_cond_share)
    if min(n_decode, n_sc, B - n_decode - n_sc) < 1:
        sys.exit(f"{B} rows in a micro-batch: too few for decode_share = {config.decode_share:g} and "
                 f"self_cond_share = {config.self_cond_share:g}; each kind needs a row")
    return slice(n_decode), slice(n_decode, n_decode + n_sc), slice(n_decode + n_sc, B)


def draw(B, L, E, n_decode, config, rng):
    """Draws guidance scales w (B,), times t (B,), noise eps (B, L, E) and p (n_decode, L, 1)."""
    how = dict(generator=rng, device=rng.device)
    ratio = (1 + config.w_max) / (1 + config.w_min)
    w = (1 + config.w_min) * ratio ** torch.rand(B, **how) - 1                 # log-uniform in 1 + w
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
    kinds      three slices of the rows, from `split_rows`
    w, t, eps, p               from `draw`
    teacher, times             for distillation: see `distilled_target`
    returns    for decode, self-conditioned and plain rows: losses (rows, L), bool where they count
    """
    dec, sc, plain = kinds
    den = slice(sc.start, plain.stop)                                        # all that denoise
    t = torch.cat([torch.ones_like(t[dec]), t[den]])                         # decode rows: t = 1
    t3 = t[:, None, None]                                                    # (B, 1, 1)
    z_dec = p * x[dec] + (1 - p) * decode_noise * eps[dec]                   # Alg. 4: p of each token
    z_den = t3[den] * x[den] + (1 - t3[den]) * noise_scale * eps[den]        # Alg. 3: t of each row
    z = torch.cat([z_dec, torch.where(cond_mask[den], x[den], z_den)])
    x_sc = torch.where(cond_mask, x, 0.0)
    x_sc[dec] = 0.0

    first_pass = teacher or getattr(model, "module", model)                  # DDP: no backward here
    with torch.no_grad():
        x_u = first_pass(z[sc], x_sc[sc], t[sc], w[sc])[0].float()           # Alg. 3: without x_sc
    x_sc[sc] = torch.where(cond_mask[sc], x[sc], x_u)

    x_pred, logits = model(z, x_sc, t, w, n_decode=dec.stop)                 # both branches at once
    x_pred, logits = x_pred.float(), logits.float()
    ce = F.cross_entropy(logits.flatten(0, 1), ids[dec].flatten(), reduction="none")        # Eq. 2
    n_sc = len(x_u)
    if teacher:
        target = distilled_target(teacher, z[den], x_sc[den], times[den], w[den], cond_mask[den])
        mse_sc, mse_plain = (x_pred - target).square().mean(2).tensor_split([n_sc])
    else:
        v = velocity(x[den], z[den], t3[den])
        v_pred = velocity(x_pred, z[den], t3[den])
        mse_plain = (v_pred[n_sc:] - v[n_sc:]).square().mean(2)                             # Eq. 1
        # If v_pred[:n_sc] equals its target, then v_pred = v_u + w (v - v_u): guidance of scale w,
        # with the self-conditioning as the condition.
        v_u = velocity(x_u, z[sc], t3[sc])
        target = v[:n_sc] + (1 - 1 / w[sc, None, None]) * (v_pred[:n_sc].detach() - v_u)    # Eq. 3
        mse_sc = (v_pred[:n_sc] - target).square().mean(2)
    counted = ~cond_mask[..., 0]
    return (ce.view_as(ids[dec]), counted[dec]), (mse_sc, counted[sc]), (mse_plain, counted[plain])


def masked_mean(values, counted):
    return (values * counted).sum() / counted.sum()


def objective(parts, config):
    """Returns 0.2 CE + 0.4 MSE (self-conditioned) + 0.4 MSE (plain) of what `losses` returns."""
    shares = [config.decode_share, config.self_cond_share]
    return sum(share * masked_mean(*part) for share, part in zip([*shares, 1 - sum(shares)], parts))


def batch_losses(model, data, rows, rng, config):
    """Encodes rows, as `Rows.batch` returns them, draws the noise, and returns `losses` (Alg. 1)."""
    ids, n_cond = (torch.from_numpy(array).to(rng.device, non_blocking=True) for array in rows)
    kinds = split_rows(len(ids), config)
    cond_mask = condition_mask(n_cond, config.length)
    drop = None
    if config.cond_length:
        drop = torch.rand(len(ids), generator=rng, device=rng.device) < config.cond_drop
    with runtime.autocast(rng.device, config.bf16):
        x = embed(data.encoder, ids, data.x_mean, data.x_std,
                  cond_mask if config.cond_length else None, drop)
        drawn = draw(*x.shape, kinds[0].stop, config, rng)
        if data.teacher:
            drawn["times"] = student_times(drawn["t"], config, rng)
            drawn["t"] = drawn["times"][:, 0]
        return losses(model, x, ids, cond_mask, kinds, **drawn, noise_scale=config.noise_scale,
                      decode_noise=config.decode_noise, teacher=data.teacher)


# ---------------------------------------------------------------------------------------------------
# progressive distillation: one step of the student ends where several of its teacher end

def student_times(t, config, rng):
    """
    Returns times (B, K + 1) of the teacher's K steps within one student step of 1/student_steps.

    The step begins at (1 - 1/student_steps) t; the times within it are logit-normal, like t (B,).
    """
    how = dict(generator=rng, device=rng.device)
    span, normal = 1 / config.student_steps, torch.randn(len(t), config.teacher_substeps - 1, **how)
    inner = torch.sigmoid(config.t_mean + config.t_std * normal).sort().values
    places = F.pad(F.pad(inner, (1, 0)), (0, 1), value=1.0)                  # from 0 to 1
    return (1 - span) * t[:, None] + span * places


@torch.no_grad()
def distilled_target(teacher, z, x_sc, times, w, cond_mask):
    """
    Returns the x_pred (B, L, E) that takes the student from z, in one Euler step from times[:, 0] to
    times[:, -1], to where the teacher's K steps end. The teacher begins with the student's x_sc.
    """
    z_end = z
    for t, t_next in zip(times.mT, times.mT[1:]):
        x_pred = teacher(z_end, x_sc, t, w)[0].float()
        step = (t_next - t)[:, None, None] * velocity(x_pred, z_end, t[:, None, None])
        z_end = torch.where(cond_mask, z, z_end + step)
        x_sc = torch.where(cond_mask, x_sc, x_pred)
    start, end = times[:, 0, None, None], times[:, -1, None, None]
    return z + (1 - start) / (end - start) * (z_end - z)


# ---------------------------------------------------------------------------------------------------
# the optimisers

def orthogonal(G):
    """
    Returns the matrices G (n, rows, columns) with singular values near 1: five Newton-Schulz steps.

    A step is X <- Q X with Q = a + b A + c A^2 and A = X X^T; the A of the new X is Q A Q. So three
    steps, then two, are first multiplied as small square matrices, and only their product P meets X.
    All five at once would lose bfloat16's few digits.
    """
    tall = G.shape[1] > G.shape[2]
    X = G.mT if tall else G
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for steps in (3, 2):
        A = X @ X.mT
        P = Q = polynomial(A)
        for _ in range(steps - 1):
            A = Q @ A @ Q
            Q = polynomial(A)
            P = Q @ P
        X = P @ X
    return X.mT if tall else X


def polynomial(A, a=3.4445, b=-4.7750, c=2.0315):
    """Returns a + b A + c A^2 of symmetric matrices A (n, m, m); the coefficients are the paper's."""
    Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
    Q.diagonal(dim1=1, dim2=2).add_(a)
    return Q


class Muon(torch.optim.Optimizer):
    """
    Makes Nesterov momentum orthogonal: Muon, for 2-D weights (Tab. 4).

    Matrices of one shape are worked on together, and shared among the processes.
    """

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
        torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov, in the gradients' memory
        by_shape = groupby(sorted(group["params"], key=attrgetter("shape")), attrgetter("shape"))
        for number, (shape, params) in enumerate(by_shape):
            params = list(params)
            updates = torch.stack([param.grad.to(self.dtype) for param in params])
            mine = slice((rank() + number) % world_size(), None, world_size())
            orthogonalised = orthogonal(updates[mine])
            if world_size() > 1:
                updates.zero_()[mine] = orthogonalised
                dist.all_reduce(updates)  # each matrix is 0 in all processes but one
            else:
                updates = orthogonalised
            rate = group["lr"] * max(1, shape[0] / shape[1]) ** 0.5
            for param, update in zip(params, updates):
                param.add_(update, alpha=-rate)


def make_optimizers(model, config):
    """Returns Muon for 2-D weights and Adam for the rest; or AdamW for all, to compare."""
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), config.lr, (0.9, 0.95), weight_decay=0.0,
                                  fused=True)]
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim != 2]
    dtype = runtime.precision(rest[0].device, config.bf16)
    return [Muon(matrices, config.lr, dtype=dtype), torch.optim.Adam(rest, config.lr, fused=True)]


# ---------------------------------------------------------------------------------------------------
# the loop

def train_step(net, state, data, config):
    """
    Takes one optimiser step, on the mean gradient of all micro-batches, and updates the average.

    returns  loss, mse and ce of this process's last micro-batch, and the gradient's norm
    """
    params = list(state.model.parameters())
    B = config.micro_batch(world_size())
    order = batch_rows(len(data.train), state.step, config.batch_size, config.seed)
    for micro in range(config.accum):
        first = (rank() * config.accum + micro) * B
        rng = seeded(config.seed, state.step, rank(), micro, device=params[0].device)
        last = micro == config.accum - 1
        with nullcontext() if last or world_size() == 1 else net.no_sync():
            rows = data.train.batch(order[first:first + B])
            parts = batch_losses(net, data, rows, rng, config)
            loss = objective(parts, config)
            (loss / config.accum).backward()
    norm = torch.nn.utils.clip_grad_norm_(params, config.clip)
    state.step += 1
    left = (config.steps + 1 - state.step) / max(1, config.cooldown * config.steps)
    for optimizer in state.optimizers:
        optimizer.param_groups[0]["lr"] = config.lr * min(1, state.step / max(1, config.warmup), left)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        decay = min(config.ema, state.step / (state.step + 9))
        torch._foreach_lerp_(list(state.ema.parameters()), params, 1 - decay)
    ce, sc, plain = parts
    mse = masked_mean(*map(torch.cat, zip(sc, plain)))
    return dict(loss=loss.detach(), mse=mse.detach(), ce=masked_mean(*ce).detach()), norm


def train(net, state, data, config):
    """Takes the steps that are left; logs, validates, samples and saves when these are due."""
    finite, saved = torch.tensor(True, device=data.encoder.device), time.monotonic()
    bar = runtime.progress(total=config.steps, initial=state.step, disable=rank() > 0)
    with runtime.StopSignal() as stop, bar:
        while state.step < config.steps and not stop.everywhere():
            figures, norm = train_step(net, state, data, config)
            bar.update()
            finite &= norm.isfinite()  # on the device: no step waits for it
            overdue = time.monotonic() - saved > 60 * config.save_minutes
            saving = overdue or stop.seen or config.is_due("save", state.step)
            if (saving or config.is_due("log", state.step)) and not finite:
                sys.exit("the gradient is not finite; the checkpoints so far are kept: try a smaller "
                         "--lr or a longer --warmup")
            if rank() == 0:
                observe(state, data, config, figures, bar)
                if saving:
                    checkpoint.save(state, config.keep)
                    saved = time.monotonic()
    if state.step < config.steps:
        if rank() == 0:
            checkpoint.save(state, config.keep)
        print0(f"stopped after step {state.step}, which is saved; the same command resumes there")


def observe(state, data, config, figures, bar):
    """Appends to the log what is due after this step: losses and speed, validation, samples."""
    entry = {}
    if config.is_due("log", state.step):
        entry = {name: value.item() for name, value in figures.items()}
        steps_per_s = (state.step - bar.initial) / bar.format_dict["elapsed"]
        tokens_per_s = steps_per_s * config.batch_size * config.length
        shown = " ".join(f"{name} {value:.3f}" for name, value in entry.items())
        bar.set_postfix_str(f"{shown} {tokens_per_s:,.0f} tok/s", refresh=False)
        entry["tokens_per_s"] = round(tokens_per_s)
    if config.is_due("val", state.step):
        entry |= validate(state.ema, data, config)
        bar.write(f"step {state.step}: val mse {entry['val_mse']:.4f}, ce {entry['val_ce']:.4f}")
    if config.is_due("sample", state.step):
        source = "val" if config.cond_length else None
        conds, records = read_conditions(source, config.sample_rows, state.settings, data.tokenizer)
        texts = sample_texts(state.ema, state.settings, data.tokenizer, conds, data.encoder)
        entry["samples"] = [dict(record, text=text) for record, text in zip(records, texts)]
        bar.write("\n".join(f"  | {' | '.join(each.values())}" for each in entry["samples"]))
    if entry:
        checkpoint.append_log(state, entry)


@torch.no_grad()
def validate(model, data, config):
    """Returns MSE (plain rows) and CE on even validation rows, with the same noise every time."""
    B = config.micro_batch(world_size())
    total, count = torch.zeros(2), -(-min(config.val_rows, len(data.val)) // B)
    for i in range(count):
        rows = data.val.batch([2 * place % len(data.val) for place in range(i * B, (i + 1) * B)])
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
    state = checkpoint.new_state(config, data, device, make_optimizers)
    print0(f"{sum(param.numel() for param in state.model.parameters()):,} parameters, "
           f"{len(data.train):,} rows of {config.length} tokens, {config.steps} steps of "
           f"{config.batch_size} rows, {device.type}")
    net = DistributedDataParallel(state.model) if world_size() > 1 else state.model
    if config.bench:
        runtime.bench(lambda: train_step(net, state, data, config), config.bench,
                      config.batch_size * config.length, device, config.bf16)
    else:
        with checkpoint.open_run(state, config.fresh):
            train(net, state, data, config)
    if dist.is_initialized():
        dist.destroy_process_group()
    if state.step < config.steps and not config.bench and "RANK" not in os.environ:
        sys.exit(130)  # as after Ctrl-C, so that `&&` goes no further


if __name__ == "__main__":
    main()
