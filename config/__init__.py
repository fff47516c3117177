"""
The settings of a run: their defaults, and how a config file and then `--key=value` change them.

A config file is plain Python that assigns to some of the names below; config/docs.py is the default, config/owt_b.py the paper's.
"""
import difflib
import os
import re
import runpy
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from config.sampling import PAPER, SCHEDULES

# Threads of torch that wait shall sleep, not spin: up to 50 % slower alone, but over twice as fast beside one busy process. torch reads it once.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
ROOT = Path(__file__).absolute().parents[1]  # of the repository: relative paths of data, encoders and runs start here


@dataclass
class Config:
    # the run and its data
    name: str = "docs"             # the run's folder is <out>/<name>
    out: str = "out"
    data: str = "data/docs"        # a folder with train.bin, val.bin and meta.json
    prepare: str = ""              # the script that makes that folder, run when it is missing
    encoder: str = "t5-small"      # folder or Hugging Face repo id of the frozen T5; its tokenizer is in the same place
    length: int = 1024             # L, tokens a row
    cond_length: int = 0           # tokens of a row that its condition may take; data of pairs only
    init_from: str = ""            # start from these weights: run, file or Hugging Face repo id
    # the network (Tab. 3)
    depth: int = 12
    dim: int = 768
    heads: int = 12
    bottleneck: int = 128
    predict: str = "x"             # what the network's output stands for: x, v or eps
    # the method (Tab. 4)
    decode_share: float = 0.2      # of the rows: decode
    self_cond_share: float = 0.4   # of the rows: denoise with self-condition and guidance; the rest: plain denoise
    t_mean: float = -1.5           # time is sigmoid(N(t_mean, t_std^2))
    t_std: float = 0.8
    noise_scale: float = 2.0       # s of Eq. 1
    w_min: float = 0.5             # guidance scales, log-uniform in 1 + w
    w_max: float = 5.0
    decode_mean: float = 0.8       # the share p of x that decode rows keep is sigmoid(N(decode_mean, decode_std^2))
    decode_std: float = 0.8
    decode_noise: float = 5.0      # s' of Eq. 2; 1 for conditional tasks
    cond_drop: float = 0.1         # of the rows with a condition: it is hidden, so that sampling can guide by it
    gap_share: float = 0.0         # of the rows of text without conditions: all but a random span is given, for sample.py --infill
    # progressive distillation: a student, one of whose steps is many of its teacher's
    teacher: str = ""              # run, file or Hugging Face repo id; the student starts from its weights
    student_steps: int = 0         # its steps from noise to text
    teacher_substeps: int = 0      # of the teacher, in each of them
    rounds: int = 1                # runs in a row, each from the last one's weights: half of the student's steps, twice the teacher's
    # sampling, unless sample.py is told otherwise
    sample_steps: int = PAPER["steps"]
    sample_gamma: float = PAPER["gamma"]
    sample_gamma_power: float = PAPER["gamma_power"]
    sample_temperature: float = PAPER["temperature"]
    sample_schedule: str = PAPER["schedule"]
    sample_w: float = PAPER["w"]
    sample_cfg: float = PAPER["cfg"]
    # optimisation
    steps: int = 95_000
    batch_size: int = 512          # rows a step, over all processes
    accum: int = 1                 # micro-batches a step in each process
    optimizer: str = "muon"        # on the matrices, beside Adam; or adamw, on all weights
    lr: float = 0.002              # 0.001 x batch_size / 256
    warmup: int = 9_500            # steps
    cooldown: float = 0.0          # share of the steps: the last of them, over which the rate falls to 0
    clip: float = 1.0              # of the gradient's norm
    ema: float = 0.9999            # of the weights; less in the first steps
    seed: int = 0
    # bookkeeping, in steps
    log_interval: int = 10
    val_interval: int = 1000
    val_rows: int = 256
    sample_interval: int = 5000
    sample_rows: int = 4
    save_interval: int = 1000
    save_minutes: float = 10.0     # and whenever so many have passed
    keep: int = 2                  # checkpoints, besides best.pt
    change: bool = False           # go on with another lr, warmup, cooldown, clip, ema or seed than before. As an option: --change
    fresh: bool = False            # start anew; a run that is there is moved aside. As an option: --fresh
    # machine
    device: str = "auto"           # cuda, mps or cpu
    bf16: bool = True              # where the device is good at it
    compile: bool = True           # where there is a compiler, and at least 500 steps or a teacher
    recompute: bool = False        # activations, block by block, in the backward pass: less memory, more work
    bench: int = 0                 # only so many steps, on random tokens with a random encoder; nothing is read or saved

    def in_rounds(self):
        """The configs of the runs that this one stands for: itself, or the rounds of a distillation, named after their students' steps."""
        if not self.teacher:
            return [self]
        each, last = [], self.teacher
        for i in range(self.rounds):
            steps = self.student_steps >> i
            each.append(replace(self, name=f"{self.name}_{steps}", student_steps=steps, teacher_substeps=self.teacher_substeps << i,
                                init_from=last, sample_steps=steps, rounds=1))
            last = f"{self.out}/{each[-1].name}"
        return each

    def compiles(self):
        """Whether torch.compile, which takes half a minute, is earned back."""
        return self.compile and (self.steps >= 500 or self.bench > 0 or self.teacher != "")

    def micro_batch(self, processes):
        """How many rows one process takes at a time."""
        if self.batch_size % (processes * self.accum):
            sys.exit(f"batch_size = {self.batch_size}: not a multiple of {processes} processes x accum = {self.accum}")
        return self.batch_size // (processes * self.accum)

    def is_due(self, what, step):
        """Whether it is time after this step to log, val, sample or save; after the last one it is."""
        return step % getattr(self, f"{what}_interval") == 0 or step == self.steps


TYPES = {f.name: f.type for f in fields(Config)}
# What a resumed run may change: FREE as it likes, CHANGEABLE only with --change. Of data and encoder the fingerprints must stay.
CHANGEABLE = {"lr", "warmup", "cooldown", "clip", "ema", "seed"}
FREE = {"name", "out", "data", "encoder", "prepare", "init_from", "steps", "log_interval", "val_interval", "val_rows", "save_interval",
        "save_minutes", "keep", "change", "fresh", "device", "bf16", "compile", "recompute", "bench"}
FREE |= {name for name in TYPES if name.startswith("sample_")}
MAY_BE_NEGATIVE = {"t_mean", "decode_mean"}
MAY_BE_ZERO = {"seed", "warmup", "ema", "t_std", "decode_std", "decode_noise", "cooldown", "cond_length", "cond_drop", "gap_share",
               "student_steps", "teacher_substeps", "sample_gamma", "sample_gamma_power", "sample_cfg", "bench"}


def configure(argv, doc=""):
    """Config from `[FILE.py] [--key=value | --key value]...`; SystemExit with one line on anything else, with doc and defaults on --help."""
    if {"-h", "--help"} & set(argv):
        print(doc, "Settings, with their defaults:", *(f"  --{f.name}={f.default}" for f in fields(Config)), sep="\n")
        sys.exit()
    argv = [f"{arg}=true" if arg in ("--change", "--fresh", "--recompute") else arg for arg in argv]
    named = argv and not argv[0].startswith("-")
    given = read_file(argv[0] if named else "config/docs.py") | read_options(argv[1:] if named else argv)
    for key, value in given.items():
        if key not in TYPES:
            near = difflib.get_close_matches(key, TYPES, 1)
            sys.exit(f"{key}: no such setting" + (f"; did you mean {near[0]}?" if near else "; config/__init__.py lists them"))
        if TYPES[key] is float and type(value) is int and abs(value) < 1e12:
            given[key] = float(value)
        elif type(value) is not TYPES[key]:
            sys.exit(f"{key} = {value!r}: must be {TYPES[key].__name__}, not {type(value).__name__}")
    config = Config(**given)
    check(config)
    return config


def read_file(name):
    """What a config file assigns, as a dict."""
    file = Path(name) if Path(name).is_file() else ROOT / name
    if not file.is_file():
        sys.exit(f"{file}: no such config file; there are: {', '.join(f'config/{f.name}' for f in config_files())}")
    try:
        return {key: value for key, value in runpy.run_path(str(file)).items() if not key.startswith("_")}
    except Exception as e:
        sys.exit(f"{file}: {type(e).__name__}: {' '.join(str(e).split())[:200]}")


def config_files():
    return sorted(f for f in ROOT.glob("config/*.py") if f.stem not in ("__init__", "machine", "sampling"))


def read_options(args):
    """`--key=value` and `--key value` as a dict, each value of its setting's type."""
    given, args = {}, iter(args)
    for arg in args:
        key, eq, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            sys.exit(f"{arg}: expected --key=value")
        key = key.replace("-", "_")
        if not eq and (text := next(args, None)) is None:
            sys.exit(f"--{key}: has no value; write --{key}=value")
        kind = TYPES.get(key, str)  # a key that does not exist is refused later
        try:
            given[key] = (text if kind is str else kind(text.replace("_", "")) if kind is not bool else
                          {"true": True, "1": True, "false": False, "0": False}[text.lower()])
        except (ValueError, KeyError):
            sys.exit(f"--{key}={text}: must be {kind.__name__}")
    return given


def check(config):
    """SystemExit with one line where a number is out of range or does not fit another."""
    for key, value in asdict(config).items():
        if TYPES[key] in (int, float):
            low, zero = -100 if key in MAY_BE_NEGATIVE else 0, key in MAY_BE_ZERO
            if not (low < value < 1e9 or value == 0 and zero):
                sys.exit(f"{key} = {value}: must be {'at least' if zero else 'greater than'} {low}, and below 1e9")
    if not re.fullmatch(r"\w[\w.-]{0,99}", config.name):
        sys.exit(f"name = {config.name!r}: must be a plain folder name of letters, digits, '.', '_' and '-'")
    if config.decode_share + config.self_cond_share >= 1:
        sys.exit(f"decode_share + self_cond_share = {config.decode_share + config.self_cond_share:g}: must leave room for plain rows, below 1")
    for key, names in dict(predict=["x", "v", "eps"], optimizer=["muon", "adamw"], sample_schedule=SCHEDULES).items():
        if getattr(config, key) not in names:
            sys.exit(f"{key} = {getattr(config, key)!r}: must be one of {', '.join(names)}")
    if config.gap_share and config.cond_length or config.gap_share > 1:
        sys.exit(f"gap_share = {config.gap_share:g}: must be a share of the rows, up to 1, and is for data without conditions")
    if config.cooldown > 1:
        sys.exit(f"cooldown = {config.cooldown:g}: must be a share of the steps, from 0 to 1")
    if bool(config.teacher) != (config.student_steps > 0) or bool(config.teacher) != (config.teacher_substeps > 0):
        sys.exit(f"teacher = {config.teacher!r}, student_steps = {config.student_steps}, teacher_substeps = {config.teacher_substeps}: "
                 "a distillation needs all three")
    if config.teacher and config.student_steps % 2 ** (config.rounds - 1):
        sys.exit(f"student_steps = {config.student_steps}: cannot be halved {config.rounds - 1} times, for rounds = {config.rounds}")
    if 0 < config.bench < 3:
        sys.exit(f"bench = {config.bench}: must be at least 3, for the first two steps compile and fill caches, and are not timed")
    if config.ema >= 1 or config.w_max < config.w_min:
        sys.exit(f"ema = {config.ema}, w_min = {config.w_min}, w_max = {config.w_max}: ema must be below 1, w_max at least w_min")
