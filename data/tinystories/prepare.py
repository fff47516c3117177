"""
TinyStories: two million stories in the words of small children, tokenised for t5-small, each ended with </s>, all end to end.

An interrupted run leaves nothing behind; run again, it starts anew.

    pip install datasets
    python data/tinystories/prepare.py
    python data/tinystories/prepare.py --limit 20000 --out data/stories_trial    # a trial
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from config.machine import run_program  # noqa: E402
from data.files import build, columns, hub, options  # noqa: E402

REPO = "roneneldan/TinyStories"


def main(argv=None):
    args = options(__doc__, HERE, REPO).parse_args(argv)
    splits, total = hub(args.repo, {"train": "train", "validation": "val"}, args.limit)
    items = ((side, story) for side, rows in splits for story in columns(args.repo, rows, "text"))
    build(args, items, total=total)


if __name__ == "__main__":
    run_program(main)
