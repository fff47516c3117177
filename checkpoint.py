"""
What a run leaves on disk, and how it is read back.

    out/<name>/ckpt_<step>.pt   the newest few checkpoints, each written aside and then renamed
    out/<name>/log.jsonl        one line now and then; of lines with the same step, the last counts
    out/<name>/t5/              a copy of the encoder, if that is a folder: a run can be moved or shared
"""
import copy
import itertools
import json
import os
import re
import shutil
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import torch

from config import ROOT, Config
from model import ELF, Architecture
from runtime import (cast_matrices, compile_blocks, max_over_processes, precision, print0, rank)

# What released weights do not say (Tab. 4): where they differ from the defaults of Config, by name.
PAIRS = dict(sample_steps=64, sample_gamma=0.0, sample_w=1.0, sample_cfg=2.0)
RELEASED = {"de-en": PAIRS | dict(length=128, cond_length=64, data="data/wmt14_de_en"),
            "xsum": PAIRS | dict(length=1088, cond_length=1024, data="data/xsum"),
            "PD-owt": dict(sample_steps=8, sample_w=2.5)}

RENAMED = [  # the names of earlier checkpoints, and those of the reference
    (r"^scale\.", "guidance."), (r"^denoise\.", "x_head."), (r"^unembed\.", "token_head."),
    (r"^(module\.|_orig_mod\.)+", ""), (r"^self_cond_proj\.", "in_proj."),
    (r"^text_proj\.proj1\.", "bottleneck.0."), (r"^text_proj\.proj2\.", "bottleneck.1."),
    (r"^t_embedder\.mlp_", "time.mlp."), (r"^t_emb_tokens$", "time.tokens"),
    (r"^self_cond_cfg_embedder\.mlp_", "guidance.mlp."),
    (r"^self_cond_cfg_tokens$", "guidance.tokens"),
    (r"^final_layer\.norm_final\.", "x_head.0."), (r"^final_layer\.linear\.", "x_head.1."),
    (r"^proj_kernel$", "token_head.0.weight"), (r"^proj_bias$", "token_head.0.bias"),
    (r"^unembed_kernel$", "token_head.2.weight"), (r"^unembed_bias$", "token_head.2.bias")]


# ---------------------------------------------------------------------------------------------------
# finding and loading

def checkpoints(folder):
    """Returns the checkpoint files in a folder, of a run or of released weights, newest first."""
    files = [f for f in folder.glob("*") if re.fullmatch(r"ckpt(_\d+)?\.pt|checkpoint_\d+", f.name)]
    return sorted(files, key=lambda f: int("0" + re.sub(r"\D", "", f.name)), reverse=True)


def newest_run():
    """Returns the folder under out/ that was written last."""
    files = sorted((ROOT / "out").glob("**/ckpt_*.pt"), key=lambda f: f.stat().st_mtime)
    if not files:
        sys.exit("no run under out/ yet: train one with `python train.py`, or name released weights: "
                 "--ckpt embedded-language-flows/ELF-B-owt-torch")
    return str(files[-1].parent)


def find_checkpoints(source):
    """Returns the checkpoint files, newest first, of a file, run folder or Hugging Face repo id."""
    path = Path(source) if Path(source).exists() else ROOT / source
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        from huggingface_hub import snapshot_download
        try:
            path = Path(snapshot_download(source, allow_patterns=["ckpt*", "checkpoint_*", "t5/*"]))
        except Exception as error:  # the hub's errors share no base class
            sys.exit(f"{source}: not a local path, and not fetched from the Hugging Face hub "
                     f"({type(error).__name__}); check the name and the network")
    files = [path] if path.is_file() else checkpoints(path)
    return files or sys.exit(f"{source or repr(source)}: no checkpoint, run folder or Hugging Face "
                             "repo id of this name")


def read_newest(files):
    """Returns (file, content) of the first file that can be read, and names those that cannot."""
    for file in files:
        try:
            return file, dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:  # a damaged file fails in as many ways as there are formats
            reason = " ".join(str(error).split())[:100]
            print(f"{file}: not a readable checkpoint ({type(error).__name__}: {reason})",
                  file=sys.stderr)
    sys.exit(f"{files[0].parent}: no checkpoint can be read")


def load(source, device="cpu"):
    """
    Loads a trained network with its moving-average weights.

    source   a run folder or checkpoint of train.py; a file in the reference's format (a dict with
             `ema_params1` or `params`, or a bare state dict); or a Hugging Face repo id
    returns  (ELF in eval mode, the run's settings as a dict: those of Config, x_mean, x_std, ...)
    raises   SystemExit with one line if the file is missing, damaged or of another shape
    """
    file, content = read_newest(find_checkpoints(str(source)))
    settings = asdict(Config()) | dict(x_mean=0.0, x_std=0.2)
    try:
        weights = {}
        ema = content.get("ema") or content.get("ema_params1") or content.get("params") or content
        for name, tensor in ema.items():
            for pattern, ours in RENAMED:
                name = re.sub(pattern, ours, name)
            weights[name] = tensor
        if "settings" in content:
            settings |= content["settings"]
            if (file.parent / "t5").is_dir():
                settings["encoder"] = str(file.parent / "t5")
        else:
            for name in ("token_head.0.weight", "token_head.2.weight"):
                weights[name] = weights[name].T.contiguous()  # the reference stores (in, out)
            for name, changes in RELEASED.items():
                settings |= changes if name in str(source) else {}
        with torch.device("meta"):
            model = ELF(architecture_of(weights, settings["predict"]))
        model.load_state_dict(weights, assign=True)
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        sys.exit(f"{file}: not an ELF checkpoint, or of another shape "
                 f"({type(error).__name__}: {reason})")
    return model.to(device).eval(), settings


def architecture_of(weights, predict):
    """Returns the Architecture that weights have, as their shapes tell."""
    bottleneck, embed_dim = weights["bottleneck.0.weight"].shape
    dim, head_dim = len(weights["bottleneck.1.weight"]), len(weights["blocks.0.attn.q_norm.weight"])
    depth = sum(name.endswith("attn.qkv.weight") for name in weights)
    vocab_size = len(weights["token_head.2.bias"])
    return Architecture(depth, dim, dim // head_dim, embed_dim, vocab_size, bottleneck, predict)


# ---------------------------------------------------------------------------------------------------
# saving and resuming

@dataclass
class State:
    """What a checkpoint keeps of a run."""
    folder: Path
    settings: dict      # of Config; x_mean and x_std; the fingerprints of data, tokenizer, encoder
    model: ELF
    ema: ELF            # the moving average of its weights; samples come from it
    optimizers: list
    step: int = 0       # steps done


def save(state, keep):
    """Writes ckpt_<step>.pt, and then removes all but the newest `keep`."""
    content = dict(step=state.step, settings=state.settings, model=state.model.state_dict(),
                   ema=state.ema.state_dict(), optimizers=[o.state_dict() for o in state.optimizers])
    temporary = state.folder / "ckpt.tmp"
    with open(temporary, "wb") as f:
        torch.save(content, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, state.folder / f"ckpt_{state.step:08}.pt")
    for old in checkpoints(state.folder)[keep:]:
        old.unlink()


def append_log(state, entry):
    with open(state.folder / "log.jsonl", "a") as f:
        f.write(json.dumps(dict(step=state.step) | entry) + "\n")


# What a resumed run may not change, and what a student may not have other than its teacher.
SIZES = ["depth", "dim", "heads", "bottleneck", "predict", "optimizer", "fingerprint"]
EMBEDDINGS = ["length", "cond_length", "tokenizer", "encoder_weights"]


def differences(before, now):
    """Returns a line for each setting that differs from what it was before."""
    return {key: f"{key} {before[key]!r:.40} -> {value!r:.40}"
            for key, value in now.items() if before.get(key, value) != value}


def resume(state):
    """
    Loads the newest readable checkpoint of state's run into it, if there is one.

    No random state is kept: noise is drawn from (seed, step, rank, micro-batch) and the order of the
    data from (seed, epoch), so the step alone says how both go on.
    raises   SystemExit if that run has other sizes, data, tokenizer or encoder
    """
    if files := checkpoints(state.folder):
        _, content = read_newest(files)
        differ = differences(content["settings"], state.settings)
        if refused := [differ[key] for key in SIZES + EMBEDDINGS if key in differ]:
            sys.exit(f"{state.folder}: holds another run ({', '.join(refused)}); choose another "
                     "--name, or move that run aside with --fresh")
        state.model.load_state_dict(content["model"])
        state.ema.load_state_dict(content["ema"])
        for optimizer, saved in zip(state.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        state.step = content["step"]
        print0(f"{state.folder}: resumes at step {state.step}, {', '.join(differ.values())}")
    if max_over_processes(state.step) != -max_over_processes(-state.step):
        sys.exit(f"{state.folder}: not the same on all machines; choose an --out that they share")


def new_state(config, data, device, make_optimizers):
    """Returns the State of a run before its first step; loads weights and teacher that it names."""
    torch.manual_seed(config.seed)
    model = ELF(Architecture(config.depth, config.dim, config.heads, data.encoder.config.d_model,
                             len(data.tokenizer), config.bottleneck, config.predict)).to(device)
    model.recompute = config.recompute
    settings = asdict(config) | data.identity
    if config.init_from:
        other, _ = load(config.init_from, device)
        if other.arch != model.arch:
            sys.exit(f"init_from = {config.init_from}: it has {other.arch}, this run {model.arch}")
        model.load_state_dict(other.state_dict())
    if config.teacher:
        data.teacher, before = load(config.teacher, device)
        differ = differences(before, settings)
        if differ := [differ[key] for key in [*EMBEDDINGS, "noise_scale"] if key in differ]:
            sys.exit(f"teacher = {config.teacher}: it was trained otherwise ({', '.join(differ)})")
        cast_matrices(data.teacher.requires_grad_(False), precision(device, config.bf16))
    ema = copy.deepcopy(model).requires_grad_(False)
    if config.compile and (config.steps >= 500 or config.bench or config.teacher):  # else not worth it
        frozen = [*(data.teacher.blocks if config.teacher else []),
                  *(data.encoder.encoder.block if device.type == "cuda" else [])]
        compile_blocks([*model.blocks, *ema.blocks, *frozen], device)
    folder = ROOT / config.out / config.name
    return State(folder, settings, model, ema, make_optimizers(model, config))


@contextmanager
def open_run(state, fresh=False):
    """Creates a run's folder, locks it while it trains, and resumes; fresh moves an old run aside."""
    folder = state.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(f"{folder}.lock", timeout=0) if rank() == 0 else nullcontext():
            if fresh and rank() == 0 and checkpoints(folder):
                aside = (folder.with_name(f"{folder.name}.old-{n}") for n in itertools.count(1))
                os.rename(folder, old := next(path for path in aside if not path.exists()))
                print(f"{folder}: the run that was there is now {old}")
                folder.mkdir()
            max_over_processes(0)  # wait for that
            resume(state)
            encoder = ROOT / state.settings["encoder"]
            if rank() == 0 and encoder.is_dir() and not (folder / "t5").exists():
                shutil.copytree(encoder, folder / "t5.tmp", dirs_exist_ok=True)
                os.rename(folder / "t5.tmp", folder / "t5")
            yield
    except filelock.Timeout:
        sys.exit(f"{folder}: another process trains there; wait for it, or choose another --name")
