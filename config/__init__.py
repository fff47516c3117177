"""
The settings of a run: their defaults, and how a config file and then `--key=value` change them.

A config file assigns to some of the names below; with `base = "config/docs.py"` the others are
those of that file. config/docs.py is the default; config/owt_b.py is the paper's.
"""
import argparse
import difflib
import functools
import re
import runpy
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import runtime

ROOT = Path(__file__).absolute().parents[1]  # the repository; relative paths start here

@dataclass
class Config:
    # the run and its data
    name: str = "docs"              # the run's folder is <out>/<name>
    out: str = "out"                # folder of all runs
    data: str = "data/docs"         # a prepared folder, with meta.json, train.bin and val.bin
    prepare: str = ""               # the script that prepares that folder, run if it is missing
    encoder: str = "t5-small"       # folder or Hugging Face repo id of the frozen T5
    length: int = 1024              # L, tokens in a row
    cond_length: int = 0            # the most tokens of a condition; 0 for data without pairs
    init_from: str = ""             # start from the weights of this run, file or repo id
    # the network (Tab. 3)
    depth: int = 12                 # blocks
    dim: int = 768                  # d, the width
    heads: int = 12                 # attention heads
    bottleneck: int = 128           # channels between the embeddings and the network
    predict: str = "x"              # what the network's output stands for
    # the method (Tab. 4)
    decode_share: float = 0.2       # share of the rows that decode
    self_cond_share: float = 0.4    # share of the rows that denoise with self-conditioning
    t_mean: float = -1.5            # t = sigmoid(N(t_mean, t_std^2))
    t_std: float = 0.8              # see t_mean
    noise_scale: float = 2.0        # scale of the noise in z_t
    w_min: float = 0.5              # least guidance scale w, which is log-uniform in 1 + w
    w_max: float = 5.0              # largest guidance scale w
    decode_mean: float = 0.8        # p = sigmoid(N(decode_mean, decode_std^2))
    decode_std: float = 0.8         # see decode_mean
    decode_noise: float = 5.0       # scale of the noise on decode rows; 1 for conditional tasks
    cond_drop: float = 0.1          # share of the rows whose condition is hidden
    # progressive distillation: one step of the student is worth several of its teacher
    teacher: str = ""               # run, file or repo id of the frozen teacher
    student_steps: int = 0          # steps of the student from noise to text
    teacher_substeps: int = 0       # steps of the teacher in each of them
    # sampling, unless sample.py is told otherwise
    sample_steps: int = 32          # Euler steps
    sample_gamma: float = 1.5       # how much noise each step puts back; 0 is the ODE
    sample_gamma_power: float = 0.0  # anneals it: gamma (1 - t)^gamma_power
    sample_temperature: float = 1.0  # factor on all noise
    sample_schedule: str = "logit-normal"  # how the times are spaced
    sample_w: float = 3.0           # guidance scale w, trained on [w_min, w_max]
    sample_cfg: float = 1.0         # guidance by the condition; 1 is none
    # optimisation
    steps: int = 95_000             # optimiser steps
    batch_size: int = 512           # rows per step, over all processes
    accum: int = 1                  # micro-batches per step in each process
    optimizer: str = "muon"         # muon on the matrices and Adam on the rest, or AdamW on all
    lr: float = 0.002               # learning rate; the paper's is 0.001 x batch_size / 256
    warmup: int = 9_500             # steps over which the rate rises
    cooldown: float = 0.0           # share of the steps, at the end, over which it falls to 0
    clip: float = 1.0               # largest gradient norm
    ema: float = 0.9999             # decay of the weights' moving average, less at first; 0 is none
    seed: int = 0                   # of weights, noise and the order of the data
    # bookkeeping
    log_interval: int = 10          # steps between lines of log.jsonl
    val_interval: int = 1000        # steps between validations
    val_rows: int = 256             # rows of a validation
    sample_interval: int = 5000     # steps between samples
    sample_rows: int = 4            # samples each time
    save_interval: int = 1000       # steps between checkpoints
    save_minutes: float = 10.0      # and a checkpoint whenever so many minutes have passed
    keep: int = 2                   # how many checkpoints to keep
    fresh: bool = False             # start anew, and move a run that is there aside
    # machine
    device: str = "auto"            # cuda, mps or cpu
    bf16: bool = True               # bfloat16, where the device is fast at it
    compile: bool = True            # torch.compile, in runs that are long enough to pay for it
    recompute: bool = False         # recompute activations in the backward pass, to save memory
    bench: int = 0                  # only time so many steps, on random tokens

    def micro_batch(self, processes):
        """Returns the rows per process and micro-batch."""
        if self.batch_size % (processes * self.accum):
            sys.exit(f"batch_size = {self.batch_size}: not divisible by {processes} processes x "
                     f"accum = {self.accum}")
        return self.batch_size // (processes * self.accum)

    def is_due(self, what, step):
        """True if it is time after this step to log, val, sample or save; always at the end."""
        return step % getattr(self, f"{what}_interval") == 0 or step == self.steps

FIELDS = {f.name: f for f in fields(Config)}
COMMENTS = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.+)$", Path(__file__).read_text(), re.M))
CHOICES = dict(predict=["x", "v", "eps"], optimizer=["muon", "adamw"],
               sample_schedule=["logit-normal", "quantile", "uniform"])
SAMPLER = ["length", *(f"sample_{name}" for name in (  # what sample.py may do otherwise
    "steps", "gamma", "gamma_power", "temperature", "schedule", "w", "cfg"))]

def parse(f, text):
    """Returns text as a value of field f; an argparse error if it is none, or out of range."""
    try:
        value = bool(["false", "true"].index(text.lower())) if f.type is bool else f.type(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be {f.type.__name__}")
    low = -100 if f.name.endswith("_mean") else 0
    if f.type is int and f.default > 0 and f.name != "warmup":
        low = 1
    shares = f.name.endswith("_share") or f.name in ("cond_drop", "cooldown", "ema")
    if f.type in (int, float) and not low <= value <= (0.999999 if shares else 10**9):
        raise argparse.ArgumentTypeError(f"{text}: must be at least {low}, and "
                                         f"{'below 1' if shares else 'at most 1e9'}")
    return value

def add_options(parser, keys):
    """Adds an option for each of these settings; those of a sampler lose their `sample_`."""
    for key in keys:
        f, choices = FIELDS[key], CHOICES.get(key)
        switch = dict(nargs="?", const=True) if f.type is bool else {}
        name = key.removeprefix("sample_") if keys is SAMPLER else key
        parser.add_argument(f"--{name}", dest=key, type=functools.partial(parse, f), **switch,
                            choices=choices,
                            metavar=None if choices else f.type.__name__,
                            help=f"{COMMENTS[key]} ({f.default})")

def configure(argv, doc=""):
    """Returns the Config of `[FILE.py] [--key=value]...`; exits with a message if it is wrong."""
    parser = runtime.parser(doc, usage="train.py [FILE.py] [--key=value]...",
                            argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_options(parser, FIELDS)
    file = "config/docs.py" if not argv or argv[0].startswith("-") else argv[0]
    assigned = [f"--{key}={value}" for key, value in read_file(file).items()]
    given, unknown = parser.parse_known_args(assigned + argv[argv[:1] == [file]:])
    if unknown:
        key = unknown[0].lstrip("-").partition("=")[0]
        near = difflib.get_close_matches(key, FIELDS, 1)
        parser.error(f"{key}: no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    config = Config(**vars(given))
    if not re.fullmatch(r"\w[\w.-]*", config.name):
        sys.exit(f"name = {config.name!r}: must be a plain folder name")
    if config.decode_share + config.self_cond_share >= 1:
        sys.exit("decode_share + self_cond_share: must be below 1, to leave room for plain rows")
    if config.dim % (2 * config.heads):
        sys.exit(f"dim = {config.dim}: must be a multiple of 2 x heads = {2 * config.heads}")
    if config.cond_length >= config.length:
        sys.exit(f"cond_length = {config.cond_length}: must be below length = {config.length}")
    if len({config.teacher != "", config.student_steps > 0, config.teacher_substeps > 0}) > 1:
        sys.exit("teacher, student_steps, teacher_substeps: a distillation needs all three")
    return config

def read_file(name):
    """Returns what a config file and its base assign, as a dict."""
    file = Path(name) if Path(name).is_file() else ROOT / name
    if not file.is_file():
        names = sorted(f"config/{f.name}" for f in ROOT.glob("config/[a-z]*.py"))
        sys.exit(f"{name}: no such config file; there are {', '.join(names)}")
    values = {k: v for k, v in runpy.run_path(str(file)).items() if not k.startswith("__")}
    return (read_file(values.pop("base")) if "base" in values else {}) | values
