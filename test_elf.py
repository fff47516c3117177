"""The tests. Golden numbers were computed once with the reference implementation, in float32."""
import runtime  # first: before torch
import ast
import gzip
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network, nor waits for one

import filelock
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import data.docs.prepare as docs_prepare
import data.docs_cond.prepare as pairs_prepare
import data.prepare
import data.rows
import data.scratch
import data.text.prepare as text_prepare
import eval as evaluate
import train
from checkpoint import load
from config import Config, configure
from data.encoder import (EOS, condition_mask, embed, embed_conditions, load_encoder,
                          load_tokenizer, to_ids, to_text)
from lab import infill
from model import CONTROL, ELF, Architecture, as_x, rotary_table, rotate, velocity
from runtime import seeded
from sample import decode, draw_noise, flow, sample, time_grid
from sample import main as sample_main

ROOT = Path(__file__).resolve().parent
CPU = torch.device("cpu")
E, L, V = 16, 8, 24
TINY = Architecture(depth=2, dim=32, heads=2, embed_dim=E, vocab_size=V, bottleneck=8)


def wave(shape, a, b):
    return torch.from_numpy(1.5 * np.sin(a * np.arange(np.prod(shape)) + b)).float().view(shape)


X, EPS, S = (wave((2, L, E), a, b) for a, b in ((0.7, 0), (1.3, 0.5), (0.31, 1)))
NONE = torch.zeros(2, L, 1, dtype=torch.bool)  # no condition
T, W = torch.tensor([0.3, 0.8]), torch.tensor([1.5, 3.0])
IDS = (7 * torch.arange(2 * L) % 24).view(2, L)
P = torch.sigmoid(0.8 * wave((2, L, 1), 0.9, 0.2) + 0.8)
Z = T[:, None, None] * X + (1 - T[:, None, None]) * 2 * EPS


# ---------------------------------------------------------------------------------------------------
# golden values

def close(values, golden):
    """True if these are the golden numbers: row 0's first values, row 1's last, the mean size."""
    return all(torch.allclose(value, torch.tensor(want), rtol=2e-5, atol=5e-6)
               for value, want in zip(values, golden, strict=True))


def corners(y, first_position):
    return y[0, first_position, :3], y[1, -1, -3:], y.abs().mean()


def reference_shapes(d=32, f=85, head_dim=16, bottleneck=8):
    shapes = {
        "self_cond_proj.weight": (E, 2 * E), "self_cond_proj.bias": (E,),
        "text_proj.proj1.weight": (bottleneck, E),
        "text_proj.proj2.weight": (d, bottleneck), "text_proj.proj2.bias": (d,),
        "t_emb_tokens": (1, 4, d), "self_cond_cfg_tokens": (1, 4, d), "mode_tokens": (1, 4, d),
        "final_layer.norm_final.weight": (d,), "final_layer.linear.weight": (E, d),
        "final_layer.linear.bias": (E,), "proj_kernel": (d, E), "proj_bias": (E,),
        "unembed_kernel": (E, V), "unembed_bias": (V,)}
    for name in ("t_embedder", "self_cond_cfg_embedder"):
        shapes |= {f"{name}.mlp_0.weight": (d, 256), f"{name}.mlp_0.bias": (d,),
                   f"{name}.mlp_2.weight": (d, d), f"{name}.mlp_2.bias": (d,)}
    for b in ("blocks.0.", "blocks.1."):
        shapes |= {
            b + "norm1.weight": (d,), b + "norm2.weight": (d,),
            b + "attn.q_norm.weight": (head_dim,), b + "attn.k_norm.weight": (head_dim,),
            b + "attn.qkv.weight": (3 * d, d), b + "attn.qkv.bias": (3 * d,),
            b + "attn.proj.weight": (d, d), b + "attn.proj.bias": (d,),
            b + "mlp.w12.weight": (2 * f, d), b + "mlp.w12.bias": (2 * f,),
            b + "mlp.w3.weight": (d, f), b + "mlp.w3.bias": (d,)}
    return shapes


def golden_weights():
    weights = {}
    for k, (name, shape) in enumerate(sorted(reference_shapes().items())):
        y = np.sin(12.9898 * np.arange(np.prod(shape)) + 78.233 * k) * 43758.5453
        u = y - np.floor(y) - 0.5
        value = (1 + 0.4 * u if "norm" in name else 0.4 * u if len(shape) == 1 else
                 u if len(shape) == 3 else 3 * u / shape[1] ** 0.5)
        weights[name] = torch.from_numpy(value).float().view(shape)
    return weights


@pytest.fixture(scope="session")
def golden_file(tmp_path_factory):
    """The golden weights as a file in the reference's format."""
    file = tmp_path_factory.mktemp("reference") / "checkpoint_5"
    ema = {"_orig_mod." + name: value for name, value in golden_weights().items()}
    params = {name: value + 1 for name, value in ema.items()}
    torch.save(dict(params=params, ema_params1=ema, opt_state={}, step=5, epoch=0), file)
    return str(file)


@pytest.fixture(scope="session")
def golden(golden_file):
    model, settings = load(golden_file)
    found = [settings[key] for key in ("encoder", "length", "noise_scale", "x_std")]
    assert found == ["t5-small", 1024, 2.0, 0.2]
    return model


@torch.no_grad()
def test_network_golden(golden):
    x_pred, logits = golden(Z, S, T, W)
    assert logits.shape == (0, L, V) and close(corners(x_pred, 0), (
        [1.056997, 0.274448, 0.531551], [1.204682, 0.210441, -1.314764], 0.724737))
    x_pred, logits = golden(Z, torch.zeros_like(Z), torch.ones(2), W, n_decode=2)
    assert x_pred.shape == (0, L, E) and close(corners(logits, 0), (
        [-0.309268, 1.541424, -0.233249], [-0.285330, 0.430183, 0.192945], 0.574466))


def row_losses(model, n_dec, n_sc, x, ids, cond_mask, noise_scale=2.0, decode_noise=5.0, **more):
    """Returns train.losses as a mean for each row: mse of the denoise rows, ce of the decode rows."""
    kinds = slice(0, n_dec), slice(n_dec, n_dec + n_sc), slice(n_dec + n_sc, len(x))
    parts = train.losses(model, x, ids, cond_mask, kinds, noise_scale=noise_scale,
                         decode_noise=decode_noise, **more)
    ce, mse_sc, mse_plain = ((values * counts).sum(1) / counts.sum(1) for values, counts in parts)
    return torch.cat([mse_sc, mse_plain]), ce


def golden_losses(model, n_dec, n_sc, w=W):
    return row_losses(model, n_dec, n_sc, X, IDS, NONE, t=T, w=w, eps=EPS, p=P[:n_dec])


def test_losses_golden(golden):
    assert close([golden_losses(golden, 0, 2)[0]], [[3.839000, 47.918350]])
    assert close([golden_losses(golden, 0, 0)[0]], [[3.884666, 53.103138]])
    assert close([golden_losses(golden, 2, 0)[1]], [[3.889544, 3.689360]])


@pytest.mark.parametrize("gamma, w, cfg, first, last, mean", [
    (0.0, 3.0, 1.0, [0.592020, -0.126542, 0.766406], [2.115302, -0.004808, -1.311954], 0.805458),
    (1.5, 3.0, 1.0, [0.133694, -0.652191, 0.235723], [2.268517, -0.376488, -1.652228], 0.790823),
    (0.0, 1.0, 2.0, [0.569505, 0.178250, 0.955029], [1.955222, -0.070467, -1.346897], 0.868474)])
@torch.no_grad()
def test_samplers_golden(golden, gamma, w, cfg, first, last, mean):
    draws = iter(range(1, 10))

    def noise():
        y = np.sin(1.7 * np.arange(2 * L * E) + 0.3 * next(draws))
        return 2 * torch.from_numpy(y).float().view(2, L, E)

    cond_mask = condition_mask(torch.tensor([3, 2]), L) if cfg != 1 else NONE
    grid = torch.tensor([0, 0.1, 0.25, 0.5, 1])
    *_, (_, z, _) = flow(golden, 2 * EPS, grid, noise, gamma, w, cond_mask, X, cfg)
    assert close(corners(z, -1), (first, last, mean))
    tokens = torch.full((2, L), 10)
    tokens[1, 2] = 11 if cfg != 1 else 10
    assert torch.equal(decode(golden, z, w).argmax(-1), tokens)


# ---------------------------------------------------------------------------------------------------
# the network

@pytest.mark.parametrize("size, count", [
    ("b", 104_579_940), ("m", 342_540_036), ("l", 652_103_332)])
def test_parameter_counts_are_the_papers(size, count):
    config = configure([f"config/owt_{size}.py"])
    with torch.device("meta"):
        model = ELF(Architecture(config.depth, config.dim, config.heads, 512, 32100,
                                 config.bottleneck))
    assert sum(param.numel() for param in model.parameters()) == count


def test_rotary_positions_are_relative_and_control_tokens_are_not_rotated():
    cos, sin = rotary_table(20, 8, "cpu")
    q, k = torch.randn(2, 8, generator=seeded(0))

    def at(x, i):
        return rotate(x.expand(CONTROL + 20, 8), cos, sin)[i]
    first, same, other = (at(q, CONTROL + i) @ at(k, CONTROL + j) for i, j in ((3, 7), (12, 16), (3, 8)))
    assert torch.equal(at(q, CONTROL - 1), q) and torch.allclose(at(q, -1).norm(), q.norm())
    assert torch.allclose(first, same, atol=1e-5) and not torch.allclose(first, other, atol=1e-3)


@torch.no_grad()
def test_both_attention_paths_agree(golden):
    """Up to 512 positions it is written out, beyond it is the fused kernel."""
    attn, h = golden.blocks[0].attn, torch.randn(2, 513, 32, generator=seeded(1))
    tables = rotary_table(501, 16, "cpu")
    q, k, v = attn.qkv(h).view(2, 513, 3, 2, 16).permute(2, 0, 3, 1, 4)
    q, k = (rotate(norm(x), *tables) for norm, x in ((attn.q_norm, q), (attn.k_norm, k)))
    y = ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert torch.allclose(attn(h, *tables), attn.proj(y), atol=1e-5)


def test_the_first_prediction_is_the_mean_of_the_data():
    assert ELF(TINY)(Z, S, T, W)[0].abs().max() == 0


def test_gradients_reach_every_parameter(golden):
    model = ELF(golden.arch)
    model.load_state_dict(golden.state_dict())
    mse, ce = golden_losses(model, 1, 0)
    (mse.mean() + ce.mean()).backward()
    assert all(param.grad.abs().max() > 0 for param in model.parameters())


@pytest.mark.parametrize("predict", ["x", "v", "eps"])
def test_whatever_it_predicts_the_network_returns_x(predict):
    """A network that is right about v or the noise is right about x."""
    x, eps = torch.randn(2, 2, 5, 4, generator=seeded(0))
    t = torch.tensor([0.3, 0.9])[:, None, None]
    z = t * x + (1 - t) * eps
    output = dict(x=x, v=x - eps, eps=eps)[predict]
    assert torch.allclose(as_x(output, z, t, predict), x, atol=1e-5)
    model = ELF(Architecture(**vars(TINY) | dict(predict=predict)))
    expected = as_x(torch.zeros(2, L, E), Z, T[:, None, None], predict)  # its output is 0 at first
    assert torch.allclose(model(Z, S, T, W)[0], expected)


def test_recomputing_changes_no_gradient(golden, monkeypatch):
    def gradients():
        mse, ce = golden_losses(golden, 1, 0)
        return torch.autograd.grad(mse.mean() + ce.mean(), golden.parameters())
    plain, blocks = gradients(), []
    monkeypatch.setattr(golden, "recompute", True)
    hook = golden.blocks[0].register_forward_pre_hook(lambda *_: blocks.append(1))
    assert all(map(torch.equal, plain, gradients())) and len(blocks) == 3  # no-grad, grad, again
    hook.remove()


# ---------------------------------------------------------------------------------------------------
# precision and compilation

def test_a_cpu_without_bfloat16_gets_float32(monkeypatch):
    def precisions(bf16):
        with runtime.autocast(CPU, bf16):
            product = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        muon, _ = train.make_optimizers(torch.nn.Linear(4, 4), Config(bf16=bf16))
        return runtime.precision(CPU, bf16), muon.dtype, product
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert precisions(True) == 3 * (torch.bfloat16,) and precisions(False) == 3 * (torch.float32,)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert precisions(True) == 3 * (torch.float32,)


def test_compiled_is_plain_in_both_precisions(monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ELF(Architecture(**vars(TINY) | dict(depth=1)))

    def outputs(bf16):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(Z, S, T, W, n_decode=2)[1].float()
    plain = [outputs(bf16) for bf16 in (False, True)]
    assert not torch.equal(*plain)
    runtime.compile_blocks(model.blocks, CPU)
    if model.blocks[0]._compiled_call_impl is None:
        pytest.skip("torch.compile needs a C++ compiler")
    for bf16, tolerance in ((False, 1e-5), (True, 0.01)):
        assert (outputs(bf16) - plain[bf16]).norm() < tolerance * plain[bf16].norm()
    torch._dynamo.reset()


def test_nothing_compiles_twice_and_gradients_are_plain(monkeypatch):
    """After a first step and validation, later ones find their graphs ready."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ELF(TINY)

    def step(seed):
        drawn = train.draw(10, L, E, 2, Config(), seeded(seed))
        x, ids = torch.randn(10, L, E, generator=seeded(seed)), IDS.repeat(5, 1)
        loss = loss_of(model, x, ids, drawn)
        with torch.no_grad():
            loss_of(model, x, ids, drawn)
        return torch.autograd.grad(loss, model.parameters())
    plain = step(0)
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 0.8)
    for block in model.blocks:
        block.compile(dynamic=False, backend="aot_eager_decomp_partition")
    for ours, theirs in zip(step(0), plain):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    before = counters["stats"]["unique_graphs"]
    step(1), step(2)
    assert 0 < before <= 4 and counters["stats"]["unique_graphs"] == before
    torch._dynamo.reset()


def test_a_machine_without_a_compiler_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda f: f.no_such_compiler)
    model = ELF(TINY)
    runtime.compile_blocks(model.blocks, CPU)
    assert "torch.compile does not work here (AttributeError)" in capsys.readouterr().out
    assert model.blocks[0]._compiled_call_impl is None


# ---------------------------------------------------------------------------------------------------
# the losses

def loss_of(model, x, ids, drawn, config=Config()):
    """The objective of a batch without conditions, its rows divided as config says."""
    kinds, none = train.split_rows(len(x), config), torch.zeros(len(x), L, 1, dtype=torch.bool)
    parts = train.losses(model, x, ids, none, kinds, **drawn, noise_scale=2.0, decode_noise=5.0)
    return train.objective(parts, config)


def batch(B, seed=1):
    """Random embeddings and tokens, and that none of them is a condition."""
    return (torch.randn(B, L, E, generator=seeded(seed)),
            torch.randint(V, (B, L), generator=seeded(seed)), NONE[:1].expand(B, L, 1))


def draws(B, n_dec, seed=3):
    return train.draw(B, L, E, n_dec, Config(), seeded(seed))


def test_the_velocity_is_x_minus_noise_and_stays_finite():
    assert torch.allclose(velocity(X, Z, T[:, None, None]), X - 2 * EPS, atol=1e-5)
    assert torch.allclose(velocity(X, Z, torch.tensor(1.0)), (X - Z) / 0.05)


def test_guidance_of_scale_one_is_none(golden):
    def own_guess(w):  # the self-conditioned loss with the target of plain rows
        x_u = golden(Z, torch.zeros_like(Z), T, w)[0].detach()
        c = (1 - T)[:, None, None]
        return ((golden(Z, x_u, T, w)[0] - X) / c).square().mean((1, 2))
    one = torch.ones(2)
    assert torch.allclose(golden_losses(golden, 0, 2, w=one)[0], own_guess(one), rtol=1e-5)
    assert not torch.allclose(golden_losses(golden, 0, 2)[0], own_guess(W), rtol=1e-3)


def test_split_equals_three_forwards(golden):
    """Against the reference's way: three forwards, all on all rows, masks choosing what counts."""
    B, n_dec, n_sc = 10, 2, 4
    x, ids, none = batch(B)
    r = draws(B, n_dec)
    mse, ce = row_losses(golden, n_dec, n_sc, x, ids, none, **r)
    ours = torch.autograd.grad(loss_of(golden, x, ids, r), golden.parameters())

    is_dec, is_sc = torch.arange(B) < n_dec, (torch.arange(B) - n_dec) % B < n_sc
    t, w = r["t"].masked_fill(is_dec, 1), r["w"]
    p = F.pad(r["p"], (0, 0, 0, 0, 0, B - n_dec))
    t3, dec3, sc3 = t[:, None, None], is_dec[:, None, None], is_sc[:, None, None]
    z = torch.where(dec3, p * x + (1 - p) * 5 * r["eps"], t3 * x + (1 - t3) * 2 * r["eps"])
    zero = torch.zeros_like(z)
    with torch.no_grad():
        x_u = golden(z, zero, t, w)[0]                    # first forward: unconditional
        x_c = golden(z, x_u, t, w)[0]                     # second: conditional, for the target
    x_sc = torch.where(sc3, x_u, zero)
    x_pred = golden(z, x_sc, t, w)[0]                     # third, with gradient, in each mode
    logits = golden(z, x_sc, t, w, n_decode=B)[1]
    c = (1 - t3).clamp(min=0.05)
    v, v_u, v_c = (x - z) / c, (x_u - z) / c, (x_c - z) / c
    target = torch.where(sc3, v + (1 - 1 / w[:, None, None]) * (v_c - v_u), v)
    all_mse = ((x_pred - z) / c - target).square().mean((1, 2))
    all_ce = F.cross_entropy(logits.mT, ids, reduction="none").mean(1)
    plain = all_mse[~is_sc & ~is_dec].mean()
    total = 0.2 * all_ce[is_dec].mean() + 0.4 * all_mse[is_sc].mean() + 0.4 * plain
    theirs = torch.autograd.grad(total, golden.parameters())
    assert torch.allclose(mse, all_mse[~is_dec], rtol=1e-6, atol=1e-6)
    assert torch.allclose(ce, all_ce[is_dec], rtol=1e-6, atol=1e-6)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * b.abs().max().item() + 1e-6)


def test_draws_follow_the_paper():
    r = draws(20_000, 4000)
    for drawn, mean in ((r["t"], -1.5), (r["p"], 0.8)):
        assert abs(drawn.logit().mean() - mean) < 0.02 and abs(drawn.logit().std() - 0.8) < 0.02
    assert r["p"].shape == (4000, L, 1) and abs(r["eps"].std() - 1) < 0.01
    assert 0.5 <= r["w"].min() and r["w"].max() <= 5
    assert abs((1 + r["w"]).log().mean() - math.log(9) / 2) < 0.01  # log-uniform from 1.5 to 6


@pytest.mark.parametrize("B", [5, 7, 13, 64])
def test_rounding_of_the_shares_does_not_change_the_objective(B):
    ones = torch.ones(B, L)
    parts = [(ones[rows], ones[rows].bool()) for rows in train.split_rows(B, Config())]
    assert abs(train.objective(parts, Config()) - 1) < 1e-6 and sum(len(y) for y, _ in parts) == B


def test_overfits_one_batch_and_decodes_it():
    torch.manual_seed(0)
    model = ELF(Architecture(**vars(TINY) | dict(dim=64, bottleneck=32)))
    x, ids, none = batch(10)
    x = torch.randn(V, E, generator=seeded(2))[ids]
    optimizers = train.make_optimizers(model, Config(lr=0.01))
    for step in range(300):
        order = torch.randperm(10, generator=seeded(step))
        mse, ce = row_losses(model, 5, 3, x[order], ids[order], none, **draws(10, 5, step),
                             decode_noise=0.2)
        (0.2 * ce.mean() + 0.4 * mse[:3].mean() + 0.4 * mse[3:].mean()).backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 300)  # to rest at the end
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        logits = decode(model, x, 1.0)
    assert F.cross_entropy(logits.mT, ids) < 0.1 and torch.equal(logits.argmax(-1), ids)


# ---------------------------------------------------------------------------------------------------
# sampling

def test_grid():
    grid = time_grid(32, seed=1)
    assert len(grid) == 33 and (grid.diff() > 0).all()
    assert torch.equal(grid, time_grid(32, seed=1)) and not torch.equal(grid, time_grid(32, seed=2))
    assert torch.allclose(time_grid(4, "uniform"), torch.tensor([0, 0.25, 0.5, 0.75, 1]))
    quantiles = time_grid(32, "quantile", t_mean=-1.0, t_std=0.5)
    normal = torch.distributions.Normal(-1.0, 0.5).cdf(quantiles[1:-1].logit())
    assert torch.allclose(normal, torch.arange(1, 32) / 32, atol=1e-5)
    for schedule in ("logit-normal", "quantile", "uniform"):
        assert torch.equal(time_grid(1, schedule), torch.tensor([0.0, 1.0]))
        assert time_grid(9, schedule)[[0, -1]].tolist() == [0, 1]


def settings_for(**more):
    short = dict(length=L, sample_steps=5, sample_gamma=1.5)
    return vars(Config()) | short | {f"sample_{key}": value for key, value in more.items()}


@torch.no_grad()
def test_rows_do_not_depend_on_their_neighbours_and_repeat_with_the_seed(golden):
    nine = sample(golden, settings_for(), 9)
    assert torch.equal(nine, sample(golden, settings_for(), 9)) and len(nine.unique(dim=0)) == 9
    assert torch.equal(nine[:3], sample(golden, settings_for(), 3))
    assert not torch.equal(nine, sample(golden, settings_for(), 9, seed=1))
    long = sample(golden, settings_for(steps=2, gamma=0.0) | dict(length=512), 9)  # eight, and one
    z = draw_noise([seeded(0, 8)], 512, E, 2.0)
    *_, (_, z, _) = flow(golden, z, time_grid(2), None, 0.0, 3.0, torch.zeros_like(z).bool(), z)
    assert torch.equal(decode(golden, z, 3.0).argmax(-1)[0], long[8])


@pytest.mark.parametrize("power", [0.0, 2.0])
@torch.no_grad()
def test_noise_that_falls_over_time(golden, power):
    """A step back is the paper's at power 0; else alpha is 1 - gamma (1 - t)^power dt."""
    grid, (z, noise) = torch.tensor([0.0, 0.2, 0.5, 1.0]), torch.randn(2, 2, L, E)
    steps = flow(golden, z, grid, lambda: noise, 1.5, 3.0, NONE, z, gamma_power=power)
    x_sc = torch.zeros_like(z)
    for i, (_, ours, _) in enumerate(steps):
        t, dt = grid[i], grid[i + 1] - grid[i]
        if i < 2:
            alpha = 1 - 1.5 * (1 - t) ** power * dt
            z, t = alpha * z + (1 - alpha) * noise, alpha * t
        x_sc = golden(z, x_sc, t.expand(2), torch.full((2,), 3.0))[0]
        z = z + (grid[i + 1] - t) * ((x_sc - z) / (1 - t).clamp(min=0.05))
        assert torch.allclose(ours, z, atol=1e-5)
    assert i == 2


def test_a_temperature_is_a_factor_on_all_noise(golden):
    halves = [sample(golden, settings_for(temperature=a) | dict(noise_scale=b), 3)
              for a, b in ((0.5, 2.0), (1.0, 1.0), (1.0, 2.0))]
    assert torch.equal(halves[0], halves[1]) and not torch.equal(halves[0], halves[2])
