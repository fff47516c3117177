"""
XSum as the paper uses it: 204,045 training pairs of a BBC article, the condition, and its one-sentence summary, the target, tokenised
for t5-small.

An interrupted run leaves nothing behind; run again, it starts anew.

    pip install datasets
    python data/xsum/prepare.py
    python data/xsum/prepare.py --limit 1000 --out data/xsum_trial    # a trial
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from config.machine import run_program  # noqa: E402
from data.files import build, columns, hub, options  # noqa: E402

REPO, REVISION = "EdinburghNLP/xsum", "refs/convert/parquet"  # `datasets` no longer runs the script of the main revision


def main(argv=None):
    args = options(__doc__, HERE, REPO).parse_args(argv)
    splits, total = hub(args.repo, {"train": "train", "validation": "val", "test": "test"}, args.limit,
                        revision=REVISION if args.repo == REPO else None)
    items = ((side, pair) for side, rows in splits for pair in columns(args.repo, rows, "document", "summary"))
    build(args, items, pairs=True, total=total)


if __name__ == "__main__":
    run_program(main)
