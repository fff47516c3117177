"""
What a run leaves on disk, and how it is read back.

    out/<name>/ckpt_<step>.pt   the newest checkpoints, each written aside and then renamed
    out/<name>/log.jsonl        losses, samples; of lines with the same step, the last counts
    out/<name>/t5/              a copy of the encoder, so that a run can be moved or shared
"""
import copy
import itertools
import os
import re
import shutil
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import torch

import runtime
from config import ROOT, SAMPLER, Config, add_options
from data.encoder import load_tokenizer
from model import ELF, Architecture
from runtime import max_over_processes, rank

# What released weights do not say (Tab. 4), where it differs from the defaults of Config.
PAIRS = dict(sample_steps=64, sample_gamma=0.0, sample_w=1.0, sample_cfg=2.0)
RELEASED = {"de-en": PAIRS | dict(data="data/wmt14_de_en", length=128, cond_length=64),
            "xsum": PAIRS | dict(data="data/xsum", length=1088, cond_length=1024),
            "PD-owt": dict(sample_steps=8, sample_w=2.5)}
RENAMED = {  # the reference's names, and those of our earlier checkpoints
    "_orig_mod.": "", "self_cond_proj.": "in_proj.",
    "text_proj.proj1": "bottleneck.0", "text_proj.proj2": "bottleneck.1",
    "t_embedder.mlp_": "time.mlp.", "t_emb_tokens": "time.tokens",
    "self_cond_cfg_embedder.mlp_": "guidance.mlp.", "self_cond_cfg_tokens": "guidance.tokens",
    "final_layer.norm_final": "x_head.0", "final_layer.linear": "x_head.1",
    "unembed_kernel": "token_head.2.weight", "unembed_bias": "token_head.2.bias",
    "proj_kernel": "token_head.0.weight", "proj_bias": "token_head.0.bias",
    "denoise.": "x_head.", "unembed.": "token_head."}

# A student has these from its teacher; a resumed run may change none of either list.
EMBEDDINGS = ["length", "cond_length", "tokenizer", "encoder_weights"]
RUN = [*EMBEDDINGS, "depth", "dim", "heads", "bottleneck", "predict", "optimizer", "fingerprint"]

def checkpoints(folder):
    """Returns the checkpoint files in a folder, newest first."""
    files = [f for f in folder.glob("*") if re.fullmatch(r"ckpt(_\d+)?\.pt|checkpoint_\d+", f.name)]
    return sorted(files, key=lambda f: int("0" + re.sub(r"\D", "", f.name)), reverse=True)

def find_checkpoints(source):
    """Returns the files, newest first, of a file, run folder or repo id; None is the newest run."""
    if source is None:
        files = sorted((ROOT / "out").glob("**/ckpt_*.pt"), key=os.path.getmtime)
        source = str(files[-1].parent) if files else sys.exit(
            "no run under out/ yet: train one with `python train.py`, or name one by --ckpt")
    path = Path(source) if Path(source).exists() else ROOT / source
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        from huggingface_hub import snapshot_download
        try:
            path = Path(snapshot_download(source, allow_patterns=["ckpt*", "checkpoint_*", "t5/*"]))
        except Exception as error:  # the hub's errors share no base class
            sys.exit(f"{source}: no such path, and not on the Hugging Face hub ({error!r:.80}); "
                     "check the name and the network")
    files = [path] if path.is_file() else checkpoints(path) if source else []
    return files or sys.exit(f"{source!r}: no checkpoint, run folder or Hugging Face repo id")

def read_newest(files):
    """Returns (file, content) of the first file that can be read, and names those that cannot."""
    for file in files:
        try:
            return file, dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:  # a damaged file fails in as many ways as there are formats
            print(f"{file}: not a readable checkpoint ({error!r:.100})", file=sys.stderr)
    sys.exit(f"{files[0].parent}: no checkpoint can be read")

def load(source, device="cpu"):
    """
    Loads a trained network, with its moving-average weights, and the settings of its run.

    source   a run folder or checkpoint of train.py, a file in the reference's format, a Hugging
             Face repo id, or None for the newest run
    returns  ELF in eval mode, and a dict of Config's settings, x_mean, x_std, ...
    raises   SystemExit with one line if the file is missing, damaged or of another shape
    """
    file, content = read_newest(find_checkpoints(source))
    settings, weights = asdict(Config(data="data/openwebtext")) | dict(x_mean=0.0, x_std=0.2), {}
    try:
        ema = content.get("ema") or content.get("ema_params1") or content.get("params") or content
        for name, tensor in ema.items():
            for theirs, ours in RENAMED.items():
                name = name.replace(theirs, ours)
            weights[name] = tensor
        if "settings" in content:
            settings |= content["settings"]
            if (file.parent / "t5").is_dir():
                settings["encoder"] = str(file.parent / "t5")
        else:
            for name in ("token_head.0.weight", "token_head.2.weight"):
                weights[name] = weights[name].T.contiguous()  # the reference stores (in, out)
            for name, changes in RELEASED.items():
                settings |= changes if name in source else {}
        bottleneck, embed_dim = weights["bottleneck.0.weight"].shape
        dim, head = len(weights["bottleneck.1.weight"]), len(weights["blocks.0.attn.q_norm.weight"])
        depth = sum(name.endswith("attn.qkv.weight") for name in weights)
        with torch.device("meta"):
            model = ELF(Architecture(depth, dim, dim // head, embed_dim,
                                     len(weights["token_head.2.bias"]), bottleneck,
                                     settings["predict"]))
        model.load_state_dict(weights, assign=True)
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        sys.exit(f"{file}: not an ELF checkpoint, or of another shape ({error!r:.300})")
    return model.to(device).eval(), settings | dict(checkpoint=str(file))

def open_sampler(parser, argv):
    """Adds a sampler's options; returns them, the network, its settings and the tokenizer."""
    parser.add_argument("--ckpt", help="run folder, checkpoint or repo id (the newest run)")
    parser.add_argument("--n", type=int, default=4, help="number of samples (4)")
    parser.add_argument("--seed", type=int, default=0, help="of noise and times (0)")
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu (the best there is)")
    add_options(parser, SAMPLER)
    args = parser.parse_args(argv)
    device = runtime.pick_device(args.device)
    model, settings = load(args.ckpt, device)
    settings |= {key: value for key in SAMPLER if (value := getattr(args, key)) is not None}
    runtime.cast_matrices(model, runtime.precision(device, settings["bf16"]))
    if args.n * settings["length"] > 2**17:  # minutes of work: compiling takes half a minute
        runtime.compile_blocks(model.blocks, device)
    return args, model, settings, load_tokenizer(settings["encoder"], settings.get("tokenizer"))

# ---- beginning, saving and resuming a run --------------------------------------------------------

@dataclass
class State:
    """What a checkpoint keeps of a run."""
    folder: Path
    settings: dict      # of Config; x_mean and x_std; fingerprints of data, tokenizer and encoder
    model: ELF
    ema: ELF            # the moving average of its weights, which samples come from
    optimizers: list
    step: int = 0       # steps done

def new_state(config, data, device, make_optimizers):
    """Returns the State of a run before its first step; loads the weights and teacher it names."""
    torch.manual_seed(config.seed)
    E, V = data.encoder.config.d_model, len(data.tokenizer)
    model = ELF(Architecture(config.depth, config.dim, config.heads, E, V, config.bottleneck,
                             config.predict)).to(device)
    model.recompute = config.recompute
    settings, frozen = asdict(config) | data.identity, []
    if config.init_from:
        other, _ = load(config.init_from, device)
        if other.arch != model.arch:
            sys.exit(f"init_from = {config.init_from}: it has {other.arch}, this run {model.arch}")
        model.load_state_dict(other.state_dict())
    if config.teacher:
        data.teacher, before = load(config.teacher, device)
        if differ := differences(before, settings, [*EMBEDDINGS, "noise_scale"]):
            sys.exit(f"teacher = {config.teacher}: it was trained otherwise ({differ})")
        runtime.cast_matrices(data.teacher, runtime.precision(device, config.bf16))
        frozen += data.teacher.requires_grad_(False).blocks
    ema = copy.deepcopy(model).requires_grad_(False)
    if config.compile and (config.steps >= 500 or config.bench or config.teacher):
        frozen += data.encoder.encoder.block if device.type == "cuda" else []
        runtime.compile_blocks([*model.blocks, *ema.blocks, *frozen], device)
    folder = ROOT / config.out / config.name
    return State(folder, settings, model, ema, make_optimizers(model, config))

def save(state, keep):
    """Writes ckpt_<step>.pt, in the first process, then removes all but the newest `keep`."""
    if rank() > 0:
        return
    content = dict(step=state.step, settings=state.settings,
                   model=state.model.state_dict(), ema=state.ema.state_dict(),
                   optimizers=[optimizer.state_dict() for optimizer in state.optimizers])
    with open(state.folder / "ckpt.tmp", "wb") as f:
        torch.save(content, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f.name, state.folder / f"ckpt_{state.step:08}.pt")
    for old in checkpoints(state.folder)[keep:]:
        old.unlink()

def differences(before, now, keys):
    """Returns which of these settings are other than before, as text."""
    return ", ".join(f"{key} {before[key]!r:.40} -> {now[key]!r:.40}" for key in keys
                     if key in now and before.get(key, now[key]) != now[key])

@contextmanager
def open_run(state, fresh=False):
    """
    Creates a run's folder, locks it, and resumes the run; fresh moves a run that is there aside.

    No random state is kept: noise is drawn from (seed, step, rank, micro-batch) and the order of
    the data from (seed, epoch), so the step alone says how both go on.
    raises   SystemExit if that run has other sizes, data, tokenizer or encoder, or is training
    """
    folder, encoder = state.folder, ROOT / state.settings["encoder"]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(f"{folder}.lock", timeout=0) if rank() == 0 else nullcontext():
            if fresh and rank() == 0 and checkpoints(folder):
                aside = (folder.with_name(f"{folder.name}.old-{n}") for n in itertools.count(1))
                os.rename(folder, old := next(path for path in aside if not path.exists()))
                print(f"{folder}: the run that was there is now {old}")
                folder.mkdir(exist_ok=True)
            max_over_processes(0)  # wait for that
            if files := checkpoints(folder):
                resume(state, read_newest(files)[1])
            if max_over_processes(state.step) != -max_over_processes(-state.step):
                sys.exit(f"{folder}: not the same on all machines; they must share --out")
            if rank() == 0 and encoder.is_dir() and not (state.step and (folder / "t5").exists()):
                shutil.rmtree(folder / "t5", ignore_errors=True)
                shutil.copytree(encoder, folder / "t5.tmp", dirs_exist_ok=True)
                os.rename(folder / "t5.tmp", folder / "t5")
            yield
    except filelock.Timeout:
        sys.exit(f"{folder}: another process trains there; wait, or choose another --name")

def resume(state, content):
    """Loads a checkpoint's content into state, and prints which settings have changed."""
    if differ := differences(content["settings"], state.settings, RUN):
        sys.exit(f"{state.folder}: holds another run ({differ}); choose another --name, or move it "
                 "aside with --fresh")
    state.model.load_state_dict(content["model"])
    state.ema.load_state_dict(content["ema"])
    for optimizer, saved in zip(state.optimizers, content["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    state.step = content["step"]
    differ = differences(content["settings"], state.settings, state.settings) or "nothing"
    runtime.print0(f"{state.folder}: resumes at step {state.step}; changed: {differ}")
