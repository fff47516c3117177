"""The tests. Golden numbers were computed once with the reference implementation, in float32."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from model import ELF, PREFIX, PRESETS, ELFConfig, load, rotary_table, rotate
from sample import decode, flow, sample, seeded, time_grid

ROOT = Path(__file__).resolve().parent
TINY = dict(depth=2, dim=32, heads=2, embed_dim=16, vocab_size=24, bottleneck=8)
E, L, V = 16, 8, 24


def wave(shape, a, b):
    return torch.from_numpy(1.5 * np.sin(a * np.arange(np.prod(shape)) + b)).float().view(shape)


def close(value, golden):
    return torch.allclose(torch.as_tensor(value).float(), torch.tensor(golden), rtol=2e-5, atol=5e-6)


def corners(y, first_position=0):
    """The three numbers that the golden tables quote: row 0's first values, row 1's last, and the mean magnitude."""
    return y[0, first_position, :3], y[1, -1, -3:], y.abs().mean()


def reference_shapes(d=32, f=85, depth=2, hd=16, bottleneck=8):
    shapes = {"self_cond_proj.weight": (E, 2 * E), "self_cond_proj.bias": (E,), "text_proj.proj1.weight": (bottleneck, E),
              "text_proj.proj2.weight": (d, bottleneck), "text_proj.proj2.bias": (d,),
              "t_emb_tokens": (1, 4, d), "self_cond_cfg_tokens": (1, 4, d), "mode_tokens": (1, 4, d),
              "final_layer.norm_final.weight": (d,), "final_layer.linear.weight": (E, d), "final_layer.linear.bias": (E,),
              "proj_kernel": (d, E), "proj_bias": (E,), "unembed_kernel": (E, V), "unembed_bias": (V,)}
    for name in ("t_embedder", "self_cond_cfg_embedder"):
        shapes |= {f"{name}.mlp_0.weight": (d, 256), f"{name}.mlp_0.bias": (d,),
                   f"{name}.mlp_2.weight": (d, d), f"{name}.mlp_2.bias": (d,)}
    for i in range(depth):
        b = f"blocks.{i}."
        shapes |= {b + "norm1.weight": (d,), b + "norm2.weight": (d,), b + "attn.q_norm.weight": (hd,), b + "attn.k_norm.weight": (hd,),
                   b + "attn.qkv.weight": (3 * d, d), b + "attn.qkv.bias": (3 * d,), b + "attn.proj.weight": (d, d),
                   b + "attn.proj.bias": (d,), b + "mlp.w12.weight": (2 * f, d), b + "mlp.w12.bias": (2 * f,),
                   b + "mlp.w3.weight": (d, f), b + "mlp.w3.bias": (d,)}
    return shapes


def golden_weights():
    params = {}
    for k, (name, shape) in enumerate(sorted(reference_shapes().items())):
        y = np.sin(12.9898 * np.arange(np.prod(shape)) + 78.233 * k) * 43758.5453
        u = y - np.floor(y) - 0.5
        value = 1 + 0.4 * u if "norm" in name else 0.4 * u if len(shape) == 1 else u if len(shape) == 3 else 3 * u / shape[1] ** 0.5
        params[name] = torch.from_numpy(value).float().view(shape)
    return params


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """The golden network, by way of a file in the reference's format."""
    file = tmp_path_factory.mktemp("reference") / "checkpoint_5"
    params = {"_orig_mod." + k: v for k, v in golden_weights().items()}
    torch.save({"params": {k: v + 1 for k, v in params.items()}, "ema_params1": params, "opt_state": {}, "step": 5, "epoch": 0}, file)
    model, settings = load(file)
    assert settings["encoder"] == "t5-small" and settings["length"] == 1024 and settings["noise_scale"] == 2.0
    return model


X, EPS, S = wave((2, L, E), 0.7, 0), wave((2, L, E), 1.3, 0.5), wave((2, L, E), 0.31, 1)
T, W = torch.tensor([0.3, 0.8]), torch.tensor([1.5, 3.0])
IDS = (7 * torch.arange(2 * L) % 24).view(2, L)
P = torch.sigmoid(0.8 * wave((2, L, 1), 0.9, 0.2) + 0.8)
Z = T[:, None, None] * X + (1 - T[:, None, None]) * 2 * EPS


# ---------------------------------------------------------------------------------------------------------------------
# golden values

@torch.no_grad()
def test_network_golden(golden):
    x_pred, logits = golden(Z, S, T, W)
    assert logits.shape == (0, L, V)
    for value, want in zip(corners(x_pred), ([1.056997, 0.274448, 0.531551], [1.204682, 0.210441, -1.314764], 0.724737)):
        assert close(value, want)
    x_pred, logits = golden(Z, torch.zeros_like(Z), torch.ones(2), W, n_decode=2)
    assert x_pred.shape == (0, L, E)
    for value, want in zip(corners(logits), ([-0.309268, 1.541424, -0.233249], [-0.285330, 0.430183, 0.192945], 0.574466)):
        assert close(value, want)


def golden_losses(model, n_dec, n_sc, w=W):
    return train.losses(model, X, IDS, n_dec, n_sc, T, w, EPS, P[:n_dec], noise_scale=2.0, decode_noise=5.0)


def test_losses_golden(golden):
    assert close(golden_losses(golden, 0, 2)[0], [3.839000, 47.918350])
    assert close(golden_losses(golden, 0, 0)[0], [3.884666, 53.103138])
    assert close(golden_losses(golden, 2, 0)[1], [3.889544, 3.689360])


@pytest.mark.parametrize("gamma, first, last, mean", [
    (0.0, [0.592020, -0.126542, 0.766406], [2.115302, -0.004808, -1.311954], 0.805458),
    (1.5, [0.133694, -0.652191, 0.235723], [2.268517, -0.376488, -1.652228], 0.790823)])
@torch.no_grad()
def test_samplers_golden(golden, gamma, first, last, mean):
    draws = iter(range(1, 10))

    def noise():
        return 2 * torch.from_numpy(np.sin(1.7 * np.arange(2 * L * E) + 0.3 * next(draws))).float().view(2, L, E)

    z = flow(golden, 2 * EPS, torch.tensor([0, 0.1, 0.25, 0.5, 1]), noise, gamma, w=3.0)
    assert close(z[0, -1, :3], first) and close(z[1, -1, -3:], last) and close(z.abs().mean(), mean)
    assert (decode(golden, z, 3.0) == 10).all()


# ---------------------------------------------------------------------------------------------------------------------
# the network

@pytest.mark.parametrize("size, count", [("B", 104_579_940), ("M", 342_540_036), ("L", 652_103_332)])
def test_parameter_counts(size, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in ELF(PRESETS[size]).parameters()) == count


def test_rotary():
    cos, sin = rotary_table(20, 8, "cpu")
    q, k = torch.randn(8), torch.randn(8)
    at = lambda x, i: rotate(x.expand(PREFIX + 20, 8), cos, sin)[i]  # noqa: E731
    assert torch.equal(at(q, PREFIX - 1), q)                                # control tokens are not rotated
    assert torch.allclose(at(q, PREFIX + 3).norm(), q.norm())
    assert torch.allclose(at(q, PREFIX + 3) @ at(k, PREFIX + 7), at(q, PREFIX + 12) @ at(k, PREFIX + 16), atol=1e-5)  # relative
    assert not torch.allclose(at(q, PREFIX + 3) @ at(k, PREFIX + 7), at(q, PREFIX + 3) @ at(k, PREFIX + 8), atol=1e-3)


def test_both_attention_paths_agree(golden):
    z = torch.randn(2, 500, E, generator=seeded(0))                         # 512 positions: plain softmax
    more = torch.cat([z, z[:, :1]], dim=1)                                  # 513: the fused kernel
    q = torch.randn(1, 2, 513, 16, generator=seeded(1))
    with torch.no_grad():
        attn = golden.blocks[0].attn
        h = torch.randn(2, 513, 32, generator=seeded(1))
        tables = rotary_table(501, 16, "cpu")
        fused = attn(h, *tables)
        qkv = attn.qkv(h).view(2, 513, 3, 2, 16).permute(2, 0, 3, 1, 4)
        q, k = (rotate(n(x), *tables) for n, x in ((attn.q_norm, qkv[0]), (attn.k_norm, qkv[1])))
        plain = attn.proj(((q @ k.mT / 4).softmax(-1) @ qkv[2]).transpose(1, 2).reshape(2, 513, 32))
        assert torch.allclose(fused, plain, atol=1e-5)
        assert golden(more, more, T, W)[0].shape == more.shape


def test_initial_prediction_is_zero():
    assert ELF(ELFConfig(**TINY))(Z, S, T, W)[0].abs().max() == 0


def test_gradients_reach_every_parameter(golden):
    model = ELF(golden.config)
    model.load_state_dict(golden.state_dict())
    mse, ce = golden_losses(model, 1, 0)
    (mse.mean() + ce.mean()).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


# ---------------------------------------------------------------------------------------------------------------------
# the losses

def test_velocity_identity():
    x_pred, c = X, (1 - T)[:, None, None]
    assert torch.allclose((x_pred - Z) / c, X - 2 * EPS, atol=1e-5)         # v = x - eps where the clamp does not act


def test_guidance_one_is_no_guidance(golden):
    def own_guess(n_sc, w):  # the self-conditioned loss with the target of plain rows
        c = (1 - T)[:, None, None].clamp(min=0.05)
        x_u = golden(Z, torch.zeros_like(Z), T, w)[0].detach()
        x_pred = golden(Z, x_u, T, w)[0]
        return (((x_pred - Z) / c - (X - Z) / c) ** 2).mean((1, 2))
    assert torch.allclose(golden_losses(golden, 0, 2, w=torch.ones(2))[0], own_guess(2, torch.ones(2)), rtol=1e-5)
    assert not torch.allclose(golden_losses(golden, 0, 2)[0], own_guess(2, W), rtol=1e-3)


def draws(B, n_dec, cfg, seed=0):
    return train.draw(B, L, E, n_dec, cfg, seeded(seed))


def test_split_equals_three_forwards(golden):
    """Against the reference's way, written out: three forwards, all on all rows, masks choosing what counts."""
    B, n_dec, n_sc = 10, 2, 4
    cfg = train.Config()
    x, ids = torch.randn(B, L, E, generator=seeded(1)), torch.randint(V, (B, L), generator=seeded(2))
    r = draws(B, n_dec, cfg, seed=3)
    mse, ce = train.losses(golden, x, ids, n_dec, n_sc, **r, noise_scale=2.0, decode_noise=5.0)
    ours = torch.autograd.grad(train.objective(mse, ce, n_sc, cfg), golden.parameters())

    is_dec = torch.arange(B) < n_dec
    is_sc = (torch.arange(B) >= n_dec) & (torch.arange(B) < n_dec + n_sc)
    t = r["t"].clone()
    t[is_dec] = 1
    p = torch.zeros(B, L, 1)
    p[:n_dec] = r["p"]
    t3 = t[:, None, None]
    z = torch.where(is_dec[:, None, None], p * x + (1 - p) * 5 * r["eps"], t3 * x + (1 - t3) * 2 * r["eps"])
    zero = torch.zeros_like(z)
    with torch.no_grad():
        x_u = golden(z, zero, t, r["w"])[0]                                       # first forward: unconditional
        cond = golden(z, x_u, t, r["w"])[0]                                       # second: conditional, for the target
    x_sc = torch.where(is_sc[:, None, None], x_u, zero)
    denoised = golden(z, x_sc, t, r["w"])[0]                                      # third, with gradient, in each mode
    logits = golden(z, x_sc, t, r["w"], n_decode=B)[1]
    c = (1 - t3).clamp(min=0.05)
    v, v_u, v_c = (x - z) / c, (x_u - z) / c, (cond - z) / c
    target = torch.where(is_sc[:, None, None], v + (1 - 1 / r["w"][:, None, None]) * (v_c - v_u), v)
    all_mse = (((denoised - z) / c - target) ** 2).mean((1, 2))
    all_ce = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)
    total = 0.2 * all_ce[is_dec].mean() + 0.4 * all_mse[is_sc].mean() + 0.4 * all_mse[~is_sc & ~is_dec].mean()
    theirs = torch.autograd.grad(total, golden.parameters())
    assert torch.allclose(mse, all_mse[~is_dec], rtol=1e-6, atol=1e-6) and torch.allclose(ce, all_ce[is_dec], rtol=1e-6, atol=1e-6)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * b.abs().max().item() + 1e-6)


def test_draws_follow_the_paper():
    r = draws(20_000, 4000, train.Config())
    logit = torch.logit(r["t"])
    assert abs(logit.mean() + 1.5) < 0.02 and abs(logit.std() - 0.8) < 0.02
    assert r["w"].min() >= 0.5 and r["w"].max() <= 5 and abs(torch.log(1 + r["w"]).mean() - np.log(9) / 2) < 0.01
    p = torch.logit(r["p"])
    assert abs(p.mean() - 0.8) < 0.02 and abs(p.std() - 0.8) < 0.02 and r["p"].shape == (4000, L, 1)
    assert abs(r["eps"].std() - 1) < 0.01


def test_kinds_do_not_change_the_objective():
    cfg = train.Config()
    for B in (5, 7, 13, 64):
        n_dec, n_sc = train.kinds(B, cfg)
        assert abs(train.objective(torch.ones(B - n_dec), torch.ones(n_dec), n_sc, cfg) - 1) < 1e-6
    with pytest.raises(SystemExit, match="too few"):
        train.kinds(2, cfg)


def test_overfits_one_batch_and_decodes_it():
    torch.manual_seed(0)
    cfg = train.Config(lr=0.01)
    model = ELF(ELFConfig(**TINY | dict(dim=64, bottleneck=32)))
    table = torch.randn(V, E, generator=seeded(1))
    ids = torch.randint(V, (10, L), generator=seeded(2))
    x, opts = table[ids], train.optimizers(model, cfg)
    for step in range(300):
        mse, ce = train.losses(model, x, ids, 2, 4, **draws(10, 2, cfg, step), noise_scale=2.0, decode_noise=0.2)
        train.objective(mse, ce, 4, cfg).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        order = torch.randperm(10, generator=seeded(step))
        x, ids = x[order], ids[order]
    with torch.no_grad():
        logits = model(x, torch.zeros_like(x), torch.ones(10), torch.ones(10), n_decode=10)[1]
        assert F.cross_entropy(logits.transpose(1, 2), ids) < 0.1
        assert torch.equal(decode(model, x, 1.0), ids)


# ---------------------------------------------------------------------------------------------------------------------
# sampling

def test_grid():
    grid = time_grid(32, seed=1)
    assert len(grid) == 33 and grid[0] == 0 and grid[-1] == 1 and (grid.diff() > 0).all()
    assert torch.equal(grid, time_grid(32, seed=1)) and not torch.equal(grid, time_grid(32, seed=2))
    assert torch.allclose(time_grid(4, "uniform"), torch.tensor([0, 0.25, 0.5, 0.75, 1]))
    assert torch.equal(time_grid(1), torch.tensor([0.0, 1.0]))


def test_samples_do_not_depend_on_chunks_and_repeat(golden):
    def run(**kw):
        return sample(golden, 7, L, steps=5, gamma=1.5, **kw)
    assert torch.equal(run(), run()) and torch.equal(run(chunk=1), run(chunk=3)) and torch.equal(run(chunk=3), run())
    assert torch.equal(sample(golden, 3, L, steps=5), run()[:3])


def test_rows_have_their_own_noise():
    a, b = (torch.randn(3, generator=seeded(0, i)) for i in (0, 1))
    assert not torch.equal(a, b) and torch.equal(a, torch.randn(3, generator=seeded(0, 0)))
