"""
What a run leaves on disk, and what comes back from there.

    out/<name>/ckpt_<step>.pt   the newest few checkpoints, each whole or not there
    out/<name>/best.pt          the best by validation
    out/<name>/log.jsonl        one line now and then, without repeats
    out/<name>/t5/              a copy of the encoder and tokenizer, if they are a folder: a run is whole wherever it is taken
    out/<name>.lock             held by the process that trains there, while it does

`load` also reads weights in the reference's format, from a file or the Hugging Face hub.
"""
import argparse
import copy
import functools
import itertools
import json
import os
import re
import shutil
import sys
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from config import CHANGEABLE, FREE, ROOT
from config.machine import barrier, cast_matrices, compile_blocks, describe, hold, max_over_processes, precision, print0, rank
from config.sampling import PAPER_PAIRS
from model import ELF, ELFConfig

VERSION = 2  # of the format of train.py's checkpoints; in 1, the tokens of the guidance scale were called `scale`

# What a file in the reference's format does not say (Tab. 4): for OpenWebText, and what differs where the name says another task.
REFERENCE_SETTINGS = dict(encoder="t5-small", length=1024, cond_length=0, noise_scale=2.0, t_mean=-1.5, t_std=0.8, x_mean=0.0, x_std=0.2)
PAIRS = {f"sample_{key}": value for key, value in PAPER_PAIRS.items()}
REFERENCE_TASKS = {"de-en": dict(length=128, cond_length=64) | PAIRS, "xsum": dict(length=1088, cond_length=1024) | PAIRS,
                   "PD-owt": dict(sample_steps=8, sample_w=2.5)}
REFERENCE_NAMES = [  # the reference's parameter names -> ours
    (r"^self_cond_proj\.", "in_proj."), (r"^text_proj\.proj1\.", "bottleneck.0."), (r"^text_proj\.proj2\.", "bottleneck.1."),
    (r"^t_embedder\.mlp_", "time.mlp."), (r"^t_emb_tokens$", "time.tokens"),
    (r"^self_cond_cfg_embedder\.mlp_", "guidance.mlp."), (r"^self_cond_cfg_tokens$", "guidance.tokens"),
    (r"^final_layer\.norm_final\.", "denoise.0."), (r"^final_layer\.linear\.", "denoise.1."),
    (r"^proj_kernel$", "unembed.0.weight"), (r"^proj_bias$", "unembed.0.bias"),
    (r"^unembed_kernel$", "unembed.2.weight"), (r"^unembed_bias$", "unembed.2.bias"),
]
# What such files hold besides tensors: settings and numbers, no code. Old and new numpy name the last two differently.
HARMLESS = [argparse.Namespace, np.dtype, np.ndarray, *{type(np.dtype(k)) for k in "?bhilBHILefd"},
            *[(f, f"numpy.{core}.multiarray.{f.__name__}") for core in ("core", "_core")
              for f in (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])]]


# ---------------------------------------------------------------------------------------------------------------------
# finding and reading

def checkpoints(folder):
    """The checkpoint files in a run's folder, or in one of released weights, the newest first."""
    files = [f for f in folder.glob("*") if re.fullmatch(r"ckpt(_\d+)?\.pt|checkpoint_.*", f.name) and f.is_file()]
    return sorted(files, key=lambda f: (f.suffix == ".pt", [int(n) for n in re.findall(r"\d+", f.name)]), reverse=True)


def newest_run():
    """The folder under out/ that was written last."""
    runs = sorted({f.parent for f in (ROOT / "out").glob("*/ckpt*.pt")}, key=lambda folder: folder.stat().st_mtime)
    if not runs:
        sys.exit("no run under out/ yet: train one with `python train.py`, "
                 "or name released weights: --ckpt embedded-language-flows/ELF-B-owt-torch")
    return str(runs[-1])


def find_checkpoints(source):
    """The checkpoint files that `source` stands for, the newest first: itself, or those of that run folder or Hugging Face repo."""
    path = Path(source)
    path = path if path.exists() else ROOT / path  # as `python train.py` says it: out/docs
    if path.is_dir():
        return checkpoints(path) or sys.exit(f"{source}: holds no ckpt_<step>.pt, ckpt.pt or checkpoint_<step>; train one: python train.py")
    if path.exists():
        return [path]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or path.suffix == ".pt":
        sys.exit(f"{source}: no such file, run folder or Hugging Face repo id (like embedded-language-flows/ELF-B-owt-torch)")
    from huggingface_hub import snapshot_download
    try:
        wanted = ["checkpoint_*", "ckpt*.pt", "t5/*.json", "t5/*.safetensors", "t5/*.model"]
        return find_checkpoints(snapshot_download(str(source), allow_patterns=wanted))
    except Exception as e:  # the hub's errors share no base class across its versions
        sys.exit(f"{source}: not a local path, and not fetched from the Hugging Face hub ({type(e).__name__}); "
                 "check the name and the network")


def read(file):
    """What torch.save wrote: data, never code, memory-mapped. Any exception if it is not whole; SystemExit if its format is newer."""
    with zipfile.ZipFile(file) as z:  # torch.load itself compares no checksums
        if sum(entry.file_size for entry in z.infolist()) > Path(file).stat().st_size:
            raise ValueError("it unpacks to more than its size")
        if bad := z.testzip():
            raise ValueError(f"wrong checksum of {bad}")
    with torch.serialization.safe_globals(HARMLESS):
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if "elf_config" in content and content.get("version", 0) > VERSION:
        sys.exit(f"{file}: of format {content['version']}, and this code knows up to {VERSION}; update the code")
    for part in ("model", "ema") if content.get("version") == 1 else ():
        content[part] = {re.sub("^scale", "guidance", name): tensor for name, tensor in content[part].items()}
    return content


def load(source, device="cpu"):
    """
    A trained network and the settings it was trained with; always the EMA weights where the file has them.

    source    a checkpoint of train.py or its run folder; a file in the reference's format (a dict with `ema_params1`
              or `params`, or a bare state dict), whose sizes are read off its shapes; or a Hugging Face repo id
    returns   (ELF in eval mode, dict of settings: encoder, length, noise_scale, x_mean, x_std, ...)
    raises    SystemExit with one line if there is no such file, or it holds anything but those names and shapes
    """
    files = find_checkpoints(source)
    for file in files:
        try:
            content = read(file)
            break
        except Exception as e:  # a damaged or foreign file fails in as many ways as there are formats
            why = f"{file}: not a readable checkpoint ({type(e).__name__}: {(str(e).splitlines() or [''])[0][:100]})"
        if file == files[-1]:
            sys.exit(why)
        print(f"{why}; trying the one before", file=sys.stderr)
    try:
        ours = "elf_config" in content
        state = content["ema"] if ours else content.get("ema_params1") or content.get("params") or content
        if sum(t.nbytes for t in state.values()) > file.stat().st_size:  # views of few numbers would take any memory once copied
            raise ValueError("its tensors are larger than the file")
        if ours:
            elf_config, settings = ELFConfig(**content["elf_config"]), content["settings"]
            if (file.parent / "t5").is_dir():
                settings["encoder"] = str(file.parent / "t5")
        else:
            elf_config, state = from_reference(state)
            task = [changes for name, changes in REFERENCE_TASKS.items() if name in str(source)]
            settings = functools.reduce(dict.__or__, task, REFERENCE_SETTINGS)
        if elf_config.depth > len(state):
            raise ValueError(f"{elf_config.depth} blocks of {len(state)} tensors")
        with torch.device("meta"):
            model = ELF(elf_config)
        model.load_state_dict(state, assign=True)
        if missing := [k for k in ("encoder", "length", "noise_scale", "x_mean", "x_std") if k not in settings]:
            raise KeyError(*missing)
        if not (type(settings["encoder"]) is str and type(settings["length"]) is int and 0 < settings["length"] < 2**24):
            raise ValueError(f"encoder = {settings['encoder']!r:.50}, length = {settings['length']!r:.50}")
    except (KeyError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as e:
        sys.exit(f"{file}: not an ELF checkpoint, or of another shape ({type(e).__name__}: {' '.join(str(e).split())[:300]})")
    return model.to(device).eval(), settings


def from_reference(params):
    """(ELFConfig, state dict under our names) from the reference's names; its two kernels are stored (in, out)."""
    state = {}
    for name, value in params.items():
        name = re.sub(r"^(module\.|_orig_mod\.)+", "", name)
        for pattern, ours in REFERENCE_NAMES:
            name = re.sub(pattern, ours, name)
        state[name] = value.T.contiguous() if name in ("unembed.0.weight", "unembed.2.weight") else value
    bottleneck, embed_dim = state["bottleneck.0.weight"].shape
    dim = len(state["bottleneck.1.weight"])
    return ELFConfig(depth=1 + max(int(k.split(".")[1]) for k in state if k.startswith("blocks.")),
                     dim=dim, heads=dim // len(state["blocks.0.attn.q_norm.weight"]), embed_dim=embed_dim,
                     vocab_size=len(state["unembed.2.bias"]), bottleneck=bottleneck), state


# ---------------------------------------------------------------------------------------------------------------------
# saving a run, and going on with it

@dataclass
class State:
    """What a checkpoint keeps of a run."""
    folder: Path
    settings: dict          # those of its config, x_mean and x_std, and the fingerprints of its data, tokenizer and encoder
    machine: dict           # as config.machine.describe has it
    model: ELF
    ema: list               # of the weights, in the order of model.parameters()
    optimizers: list
    step: int = 0           # steps done
    best: float = np.inf    # the lowest validation loss so far

    @contextmanager
    def averaged(self):
        """The network with the moving average of its weights in place of them: samples come from it."""
        pairs = list(zip(self.model.parameters(), self.ema))
        for param, average in pairs:
            param.data, average.data = average.data, param.data
        try:
            yield self.model
        finally:
            for param, average in pairs:
                param.data, average.data = average.data, param.data


def record(state, entry, saving, keep):
    """
    A line of the log, and a checkpoint where it is time or where validation is the best so far. Returns whether it saved one.
    raises   OSError, or torch.save's RuntimeError, if it cannot (a full disk)
    """
    share = state.settings["decode_share"]
    val = (1 - share) * entry["val_mse"] + share * entry["val_ce"] if "val_mse" in entry else np.inf
    better, best = val < state.best, min(val, state.best)
    if entry:
        append_log(state.folder / "log.jsonl", dict(step=state.step) | entry)
    if saving or better:
        save(replace(state, best=best), keep, better)
        state.best = best
    return saving or better


def save(state, keep, better):
    """
    Writes ckpt_<step>.pt aside, to the disk itself, then renames it, so that under its name it is whole; also as best.pt, if it is
    better than that; removes the oldest ones but `keep`. If it cannot, all is as it was.
    """
    weights = state.model.state_dict()
    content = {k: getattr(state, k) for k in ("settings", "machine", "step", "best")} | dict(
        version=VERSION, elf_config=asdict(state.model.config), model=weights, ema=dict(zip(weights, state.ema)),
        optimizers=[opt.state_dict() for opt in state.optimizers])
    file, temporary, link = (state.folder / name for name in (f"ckpt_{state.step:08}.pt", "ckpt.tmp", "best.tmp"))
    try:
        for path in (temporary, link):
            path.unlink(missing_ok=True)  # never written over: after a kill, it may be best.pt under another name
        with open(temporary, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())
        if better:  # before the checkpoint: a run killed in between validates again, and comes back here
            try:
                os.link(temporary, link)
            except OSError:  # a file system without links
                shutil.copyfile(temporary, link)
            os.replace(link, state.folder / "best.pt")
        os.replace(temporary, file)
    finally:
        for path in (temporary, link):
            path.unlink(missing_ok=True)
    for old in [f for f in checkpoints(state.folder) if f.name.startswith("ckpt_") and f.name <= file.name][keep:]:
        old.unlink()


def new_network(config, data):
    torch.manual_seed(config.seed)
    model = ELF(ELFConfig(config.depth, config.dim, config.heads, data.encoder.config.d_model, len(data.tokenizer), config.bottleneck,
                          config.predict))
    model.recompute = config.recompute
    return model.to(data.encoder.device)


def begin(config, data, folder, make_optimizers):
    """The State to start from: the run's newest checkpoint, or else new weights, or those of config.init_from."""
    model, device = new_network(config, data), data.encoder.device
    frozen = data.encoder.encoder.block if device.type == "cuda" else []  # on a CPU a few percent of a step: not worth half a minute's wait
    compiled = config.compiles() and compile_blocks([*model.blocks, *frozen], device)
    settings = asdict(config) | {key: data.meta.get(key) for key in ("x_mean", "x_std", "fingerprint", "tokenizer", "encoder_weights")}
    state = State(folder, settings, describe(device, precision(device, config.bf16) == torch.bfloat16, compiled), model,
                  [param.detach().clone() for param in model.parameters()], make_optimizers(model, config))
    if not config.bench:
        if config.init_from and (config.fresh or not checkpoints(folder)):
            start_from(config.init_from, state)
        barrier()
        if config.fresh and rank() == 0:  # now that all has been found in order
            move_aside(folder)
        barrier()
        resume(state, config)
        if rank() == 0:
            keep_encoder(ROOT / config.encoder, folder / "t5")
    size, on = sum(param.numel() for param in model.parameters()), f", from step {state.step} on" * (0 < state.step < config.steps)
    print0(f"{size:,} parameters, {len(data.train):,} training rows of {config.length} ({data.meta['fingerprint']}), {config.steps} steps of "
           f"{config.batch_size} rows, {device.type}{on}")
    return state


def keep_encoder(source, copy_to):
    """Copies an encoder's folder, if it is one, whole or not at all; SystemExit if it cannot."""
    if source.is_dir() and not copy_to.exists():
        aside = copy_to.with_name("t5.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            shutil.copytree(source, aside)
            os.rename(aside, copy_to)
        except OSError as e:
            sys.exit(f"{copy_to}: not written ({' '.join(str(e).split())[:100]}); free some disk space, or choose another --out")


def resume(state, config):
    """Brings state to where its run stands, if it has been begun."""
    changed = restore(state, CHANGEABLE if config.change else set())
    if max_over_processes(state.step) != -max_over_processes(-state.step):
        sys.exit(f"{state.folder}: not the same on all machines; choose an --out that they share")
    if rank() == 0 and state.step < config.steps:
        cut_log(state.folder / "log.jsonl", state.step)
        if changed:
            print(f"from step {state.step} on: {', '.join(changed)}", flush=True)
            append_log(state.folder / "log.jsonl", dict(step=state.step, changed=changed))


def restore(state, changeable=()):
    """
    The newest whole checkpoint of state's run into it, if there is one. No random state is in it: noise is drawn from (seed, step, rank,
    micro-batch), the order of the data from (seed, epoch), so that the step alone says how both go on.
    returns  what of the changeable settings is other than before, as lines
    raises   SystemExit if other settings are, or none of its checkpoints is whole
    """
    files = checkpoints(state.folder) + list(state.folder.glob("best.pt"))
    for file in files:
        try:
            old = read(file)
            step, best, machine = int(old["step"]), float(old.get("best", np.inf)), old.get("machine", state.machine)
            other_noise = any(machine[key] != state.machine[key] for key in ("processes", "device"))
            differ = {key: f"{key} {old['settings'][key]!r:.50} -> {value!r:.50}" for key, value in state.settings.items()
                      if key not in FREE and old["settings"].get(key, value) != value and not (key == "accum" and other_noise)}
            refused = [line for key, line in differ.items() if key not in changeable]
            if not refused:
                state.model.load_state_dict(old["model"])
                for average, name in zip(state.ema, state.model.state_dict(), strict=True):
                    average.copy_(old["ema"][name])
                for opt, opt_state in zip(state.optimizers, copy.deepcopy(old["optimizers"]), strict=True):  # `old` is the file itself
                    opt.load_state_dict(opt_state)
        except Exception as e:  # a damaged or foreign file fails in as many ways as there are formats
            print0(f"{file}: damaged, or not of train.py ({type(e).__name__}: {' '.join(str(e).split())[:60]}); trying the one before")
            continue
        if refused:
            hint = f"go on from step {step} with --change, " if set(differ) <= CHANGEABLE else ""
            sys.exit(f"{state.folder}: holds a run with other settings ({', '.join(refused)}); {hint}give this one another --name, or move "
                     "that one aside with --fresh")
        if machine != state.machine:
            print0(f"{file}: from {machine}, goes on with {state.machine}: the same weights and place in the data, but other "
                   f"{'noise' if other_noise else 'rounding'} from here on")
        state.step, state.best = step, best
        return list(differ.values())
    if files:
        sys.exit(f"{state.folder}: none of its {len(files)} checkpoints can be read; move it aside with --fresh, or give this run another --name")
    return []


def start_from(source, state):
    """The weights of another run, file or Hugging Face repo into state, its average included; SystemExit if the sizes differ."""
    other, _ = load(source)
    ours = asdict(state.model.config)
    if differ := [f"{k} {getattr(other.config, k)}, here {v}" for k, v in ours.items() if getattr(other.config, k) != v]:
        sys.exit(f"init_from = {source}: another kind of network ({'; '.join(differ)}); set these to fit")
    state.model.load_state_dict(other.state_dict())
    torch._foreach_copy_(state.ema, [param.detach() for param in state.model.parameters()])


def load_teacher(config, data):
    """The network of config.teacher, frozen; SystemExit if it was trained on other embeddings or rows than those of data."""
    device, ours = data.encoder.device, asdict(config) | data.meta
    teacher, settings = (new_network(config, data), {}) if config.bench else load(config.teacher, device)
    if differ := [f"{k} {settings[k]!r:.50}, here {ours[k]!r:.50}" for k in ("noise_scale", "length", "cond_length", "tokenizer", "encoder_weights")
                  if settings.get(k, ours[k]) != ours[k]]:
        sys.exit(f"teacher = {config.teacher}: trained with other embeddings or rows ({'; '.join(differ)}); a student learns on its teacher's")
    cast_matrices(teacher, precision(device, config.bf16))
    if config.compiles():
        compile_blocks(teacher.blocks, device)
    return teacher.requires_grad_(False)


@contextmanager
def locked(folder):
    """Makes a run's folder and holds it for this process alone; what is then still empty goes again."""
    busy = f"{folder}: another process trains there; wait until it ends, or give this run another --name"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold(folder.with_name(f"{folder.name}.lock"), functools.partial(sys.exit, busy)))
        except OSError as e:
            sys.exit(f"{folder}: not a folder that can be written ({e.strerror}); choose another --out or --name")
        try:
            yield
        finally:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def move_aside(folder):
    """Keeps the run that was there as <name>.old-1, -2, ..."""
    if any(folder.iterdir()):
        old = next(old for n in itertools.count(1) if not (old := folder.with_name(f"{folder.name}.old-{n}")).exists())
        os.rename(folder, old)
        print(f"{folder}: the run that was there is now {old}")
        folder.mkdir()


# ---------------------------------------------------------------------------------------------------------------------
# the log

def cut_log(log, step):
    """Drops from log.jsonl what comes again: the lines of steps after `step`, and one cut short by a kill."""
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    kept = [line for line in lines if (m := re.fullmatch(rb'\{"step": (\d+)(\b.*)\}\n', line))
            and (int(m[1]) < step or int(m[1]) == step and not m[2].startswith(b', "changed"'))]
    if len(kept) < len(lines):
        log.with_suffix(".tmp").write_bytes(b"".join(kept))
        os.replace(log.with_suffix(".tmp"), log)


def append_log(log, entry):
    """One more line of log.jsonl, whole or not at all."""
    line = json.dumps(entry).encode() + b"\n"
    with open(log, "ab", buffering=0) as f:
        end = f.tell()
        if f.write(line) < len(line):
            f.truncate(end)
            raise OSError(f"{log}: the disk is full")
