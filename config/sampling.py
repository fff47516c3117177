"""The options of sample.py and eval.py. The settings of a sampler that they do not give are the run's own."""
import argparse

PAPER = dict(steps=32, gamma=1.5, gamma_power=0.0, temperature=1.0, schedule="logit-normal", w=3.0, cfg=1.0)  # unless option or run says otherwise
PAPER_PAIRS = PAPER | dict(steps=64, gamma=0.0, w=1.0, cfg=2.0)  # the paper's for text from a condition
SCHEDULES = ["logit-normal", "quantile", "uniform"]
RANGES = dict(steps=(1, 10_000), n=(1, 10**7), gamma=(0, 1000), gamma_power=(0, 100), temperature=(0.01, 100), w=(0.01, 100), cfg=(0, 100),
              seed=(0, 2**32), length=(1, 2**20), gap=(1, 64), seeds=(1, 1000), real=(1, 10**7))


def sampler_parser(doc):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="Euler steps (default: the run's, else 32)")
    parser.add_argument("--gamma", type=float, help="noise put back at each step; 0 is the ODE (default: the run's, else 1.5)")
    parser.add_argument("--gamma_power", type=float, help="lets it fall over time: gamma (1 - t)^gamma_power (default: the run's, else 0)")
    parser.add_argument("--temperature", type=float, help="times the noise of training: at the start and at each step (default: the run's, else 1)")
    parser.add_argument("--w", type=float, help="guidance scale, trained on 0.5 to 5 (default: the run's, else 3)")
    parser.add_argument("--cfg", type=float, help="guidance by the condition; 1 is none (default: the run's, else 1)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the times (default: the run's, else logit-normal, drawn at random)")
    parser.add_argument("--preset", choices=["paper"], help="the paper's settings in place of the run's; the options above override them")
    parser.add_argument("--device", default="auto")
    return parser


def sample_arguments(argv, doc):
    parser = sampler_parser(doc)
    parser.add_argument("--ckpt", help="run folder, checkpoint file or Hugging Face repo id (default: the newest run under out/)")
    parser.add_argument("--n", type=int, help="samples (default 4, or one for each line of --cond FILE)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, help="tokens a sample (default: as trained)")
    parser.add_argument("--cond", help="condition: a text, a .txt file of one a line, or a .jsonl file of `input` (and `output`)")
    parser.add_argument("--infill", metavar="TEXT", help="fill each ___ of this text")
    parser.add_argument("--gap", type=int, help="with --infill: the most tokens that a gap may have (default 3)")
    parser.add_argument("--out", help="write the samples to this .jsonl file instead of the terminal")
    parser.add_argument("--force", action="store_true", help="overwrite the files of --out and --trace")
    parser.add_argument("--trace", nargs="?", const="", metavar="OUT.html",
                        help="show what x_pred of the first sample decodes to at every step (Fig. 17), or write a page on several")
    args = parse(parser, argv)
    if args.infill is not None and (args.cond is not None or args.trace is not None):
        parser.error("--infill: has neither --cond nor --trace")
    if args.out and args.out == args.trace:
        parser.error(f"--out {args.out}: is the file of --trace too; name another")
    if args.gap is not None and args.infill is None:
        parser.error(f"--gap {args.gap}: is for --infill, which fills gaps; leave it out")
    return args


def eval_arguments(argv, doc):
    parser = sampler_parser(doc)
    parser.add_argument("samples", nargs="?", help=".jsonl file of sample.py --out")
    parser.add_argument("--ckpt", help="instead: sample from this run, file or repo id (default: the newest run under out/)")
    parser.add_argument("--n", type=int, default=1000, help="samples a seed (default 1000)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ...: the table gives mean ± standard error")
    parser.add_argument("--real", type=int, metavar="N", help="score N real validation rows of the run's data instead")
    parser.add_argument("--ar", action="store_true", help="the scorer writes the samples; it does not score itself")
    parser.add_argument("--scorer", help="causal LM: path or repo id (default: the data's own, data/docs/scorer for data/docs*, else gpt2-large)")
    parser.add_argument("--results", default="results.jsonl", help="one line is appended to this file")
    args = parse(parser, argv)
    if bool(args.samples) + bool(args.real) + args.ar > 1 or args.samples and (args.ckpt or args.seeds > 1):
        parser.error("one thing at a time: a samples file, --ckpt with or without --real N, or --ar")
    return args


def parse(parser, argv):
    """The arguments; one line and the end of the program if a number is out of range."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value == []:  # argparse takes --n=-- so
            parser.error(f"--{name}: has no value")
        low, high = RANGES.get(name, (None, None))
        if low is not None and value is not None and not low <= value <= high:
            parser.error(f"--{name} {value}: must be between {low} and {high}")
    return args


def sampler_settings(args, settings):
    """Those of PAPER: as args say, else as the run's settings say, else the paper's; with --preset paper as args say, else the paper's."""
    own = {key: settings.get(f"sample_{key}", default) for key, default in PAPER.items()}
    if args.preset == "paper" and settings.get("cond_length"):
        own = PAPER_PAIRS
    elif args.preset == "paper":
        steps = args.steps or PAPER["steps"]
        own = PAPER | dict(gamma=2.0 if steps <= 16 else 1.5 if steps <= 32 else 1.0)
    return {key: given if (given := getattr(args, key)) is not None else default for key, default in own.items()}
