"""The settings of a sampler as options, for sample.py and eval.py; those not given are the run's own."""
RANGES = dict(steps=(1, 10_000), n=(1, 10**7), gamma=(0, 1000), w=(0.01, 100), cfg=(0, 100), seed=(0, 2**32), length=(1, 2**20),
              seeds=(1, 1000), real=(1, 10**7))


def add_arguments(parser):
    parser.add_argument("--steps", type=int, help="Euler steps (default: the run's, else 32)")
    parser.add_argument("--gamma", type=float, help="noise put back at each step; 0 is the ODE (default: the run's, else 1.5)")
    parser.add_argument("--w", type=float, help="guidance scale, trained on 0.5 to 5 (default: the run's, else 3)")
    parser.add_argument("--cfg", type=float, help="guidance by the condition; 1 is none (default: the run's, else 1)")
    parser.add_argument("--schedule", choices=["logit-normal", "uniform"], default="logit-normal", help="of the times")


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
    """steps, gamma, w, cfg and schedule: as args say, else as the run's settings say, else the paper's."""
    fallback = dict(steps=32, gamma=1.5, w=3.0, cfg=1.0)
    return {k: given if (given := getattr(args, k)) is not None else settings.get(f"sample_{k}", default)
            for k, default in fallback.items()} | dict(schedule=args.schedule)
