"""
WMT14 German to English as the paper uses it: 4.5 million pairs of a German condition and its English target, tokenised for t5-small.

An interrupted run leaves nothing behind; run again, it starts anew.

    pip install datasets
    python data/wmt14_de_en/prepare.py
    python data/wmt14_de_en/prepare.py --limit 10000 --out data/wmt_trial    # a trial
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from config.machine import run_program  # noqa: E402
from data.files import build, columns, hub, options  # noqa: E402

REPO, CONFIG = "wmt/wmt14", "de-en"


def main(argv=None):
    args = options(__doc__, HERE, REPO).parse_args(argv)
    splits, total = hub(args.repo, {"train": "train", "validation": "val", "test": "test"}, args.limit, name=CONFIG)
    items = ((side, pair) for side, rows in splits for pair in columns(args.repo, rows, "translation.de", "translation.en"))
    build(args, items, pairs=True, total=total)


if __name__ == "__main__":
    run_program(main)
