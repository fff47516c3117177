"""
The settings of a run: their defaults, and how a config file and then `--key=value` change them.

A config file assigns to some of the names below. `base = "config/docs.py"` in it takes the rest from
another file. config/docs.py is the default; config/owt_b.py is the paper's.
"""
import argparse
import difflib
import functools
import re
import runpy
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]  # the repository; relative paths start here


def setting(default, meaning, low=0, high=10**9, choices=None):
    """A field of Config: its default, what it means, the range of a number or the words allowed."""
    return field(default=default,
                 metadata=dict(meaning=meaning, low=low, high=high, choices=choices))


@dataclass
class Config:
    # the run and its data
    name: str = setting("docs", "the run's folder is <out>/<name>")
    out: str = setting("out", "folder of all runs")
    data: str = setting("data/docs", "a prepared folder, with meta.json, train.bin and val.bin")
    prepare: str = setting("", "the script that prepares that folder, run if it is missing")
    encoder: str = setting("t5-small", "folder or Hugging Face repo id of the frozen T5")
    length: int = setting(1024, "L, tokens in a row", 1)
    cond_length: int = setting(0, "the most tokens of a row's condition; 0 for data without pairs")
    init_from: str = setting("", "start from these weights: run, file or Hugging Face repo id")
    # the network (Tab. 3)
    depth: int = setting(12, "blocks", 1)
    dim: int = setting(768, "d, the width", 1)
    heads: int = setting(12, "attention heads", 1)
    bottleneck: int = setting(128, "channels between the embeddings and the network", 1)
    predict: str = setting("x", "what the network's output stands for", choices=("x", "v", "eps"))
    # the method (Tab. 4)
    decode_share: float = setting(0.2, "share of the rows that decode", 0, 1)
    self_cond_share: float = setting(0.4, "share that denoise with self-conditioning", 0, 1)
    t_mean: float = setting(-1.5, "t = sigmoid(N(t_mean, t_std^2))", -100)
    t_std: float = setting(0.8, "see t_mean")
    noise_scale: float = setting(2.0, "scale of the noise in z_t")
    w_min: float = setting(0.5, "least guidance scale w; w is log-uniform in 1 + w")
    w_max: float = setting(5.0, "largest guidance scale w")
    decode_mean: float = setting(0.8, "p = sigmoid(N(decode_mean, decode_std^2))", -100)
    decode_std: float = setting(0.8, "see decode_mean")
    decode_noise: float = setting(5.0, "scale of the noise on decode rows; 1 for conditional tasks")
    cond_drop: float = setting(0.1, "share of the rows whose condition is hidden", 0, 1)
    # progressive distillation: one step of the student is worth several of its teacher
    teacher: str = setting("", "run, file or Hugging Face repo id of the frozen teacher")
    student_steps: int = setting(0, "steps of the student from noise to text")
    teacher_substeps: int = setting(0, "steps of the teacher in each of them")
    # sampling, unless sample.py is told otherwise
    sample_steps: int = setting(32, "Euler steps", 1, 10_000)
    sample_gamma: float = setting(1.5, "how much noise each step puts back; 0 is the ODE")
    sample_gamma_power: float = setting(0.0, "anneals it: gamma (1 - t)^gamma_power")
    sample_temperature: float = setting(1.0, "factor on all noise")
    sample_schedule: str = setting("logit-normal", "how the times are spaced",
                                   choices=("logit-normal", "quantile", "uniform"))
    sample_w: float = setting(3.0, "guidance scale w, trained on [w_min, w_max]")
    sample_cfg: float = setting(1.0, "guidance by the condition; 1 is none")
    # optimisation
    steps: int = setting(95_000, "optimiser steps", 1)
    batch_size: int = setting(512, "rows per step, over all processes", 1)
    accum: int = setting(1, "micro-batches per step in each process", 1)
    optimizer: str = setting("muon", "on the matrices; adamw: on all weights",
                             choices=("muon", "adamw"))
    lr: float = setting(0.002, "learning rate; the paper's is 0.001 x batch_size / 256")
    warmup: int = setting(9_500, "steps over which the rate rises")
    cooldown: float = setting(0.0, "share of the steps, at the end, over which it falls to 0", 0, 1)
    clip: float = setting(1.0, "largest gradient norm")
    ema: float = setting(0.9999, "decay of the weights' moving average; less at first", 0, 0.999999)
    seed: int = setting(0, "of weights, noise and the order of the data")
    # bookkeeping, in steps
    log_interval: int = setting(10, "steps between lines of log.jsonl", 1)
    val_interval: int = setting(1000, "steps between validations", 1)
    val_rows: int = setting(256, "rows of a validation", 1)
    sample_interval: int = setting(5000, "steps between samples", 1)
    sample_rows: int = setting(4, "samples each time", 1)
    save_interval: int = setting(1000, "steps between checkpoints", 1)
    save_minutes: float = setting(10.0, "and a checkpoint whenever this many minutes have passed")
    keep: int = setting(2, "checkpoints kept, the newest", 1)
    fresh: bool = setting(False, "start anew; a run that is there is moved aside")
    # machine
    device: str = setting("auto", "cuda, mps or cpu")
    bf16: bool = setting(True, "bfloat16, where the device is fast at it")
    compile: bool = setting(True, "torch.compile, in runs that are long enough to pay for it")
    recompute: bool = setting(False, "recompute activations in the backward pass to save memory")
    bench: int = setting(0, "only measure the speed of this many steps, on random tokens")

    def micro_batch(self, processes):
        """Returns the rows per process and micro-batch."""
        parts = processes * self.accum
        if self.batch_size % parts:
            sys.exit(f"batch_size = {self.batch_size}: not divisible by {processes} processes x "
                     f"accum = {self.accum}")
        return self.batch_size // parts

    def is_due(self, what, step):
        """True if it is time after this step to log, val, sample or save; always at the end."""
        return step % getattr(self, f"{what}_interval") == 0 or step == self.steps


FIELDS = {f.name: f for f in fields(Config)}
SAMPLER = ["length", "sample_steps", "sample_gamma", "sample_gamma_power", "sample_temperature",
           "sample_schedule", "sample_w", "sample_cfg"]  # what sample.py may do otherwise


def parse(f, text):
    """Returns text as a value of field f; an argparse error if its type or range is wrong."""
    if f.type is bool:
        return bool(["false", "true"].index(text.lower()))
    value = f.type(text)
    low, high = f.metadata["low"], f.metadata["high"]
    if f.type is not str and not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text}: must be between {low} and {high}")
    return value


def add_options(parser, keys):
    """Adds an option for each of these settings; those of a sampler lose their `sample_`."""
    for key in keys:
        f, choices = FIELDS[key], FIELDS[key].metadata["choices"]
        switch = dict(nargs="?", const=True) if f.type is bool else {}
        parser.add_argument(f"--{key.removeprefix('sample_') if keys is SAMPLER else key}", dest=key,
                            metavar=None if choices else f.type.__name__, choices=choices, **switch,
                            type=functools.partial(parse, f),
                            help=f"{f.metadata['meaning']} ({f.default})")


def configure(argv, doc=""):
    """Returns the Config of `[FILE.py] [--key=value]...`; one line and exit if it is wrong."""
    parser = argparse.ArgumentParser(usage="train.py [FILE.py] [--key=value]...", description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_options(parser, FIELDS)
    named = argv and not argv[0].startswith("-")
    file, options = (argv[0], argv[1:]) if named else ("config/docs.py", argv)
    given, unknown = parser.parse_known_args(
        [f"--{key}={value}" for key, value in read_file(file).items()] + options)
    if unknown:
        key = unknown[0].lstrip("-").partition("=")[0]
        near = difflib.get_close_matches(key, FIELDS, 1)
        parser.error(f"{key}: no such setting; " +
                     (f"did you mean {near[0]}?" if near else "--help lists them all"))
    config = Config(**vars(given))
    check(config)
    return config


def read_file(name):
    """Returns what a config file and its base assign, as a dict."""
    file = Path(name) if Path(name).is_file() else ROOT / name
    if not file.is_file():
        names = sorted(f"config/{f.name}" for f in ROOT.glob("config/[a-z]*.py"))
        sys.exit(f"{name}: no such config file; there are {', '.join(names)}")
    values = {k: v for k, v in runpy.run_path(str(file)).items() if not k.startswith("__")}
    return (read_file(values.pop("base")) if "base" in values else {}) | values


def check(config):
    """Exits with one line if two settings do not fit each other."""
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
