"""
TinyStories: two million stories in the words of small children, tokenised for t5-small.

    pip install datasets
    python data/tinystories/prepare.py --limit 20000 --out data/stories_trial    # or all of it
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.prepare import build_splits, options  # noqa: E402


def main(argv=None):
    args = options(__doc__, HERE, "roneneldan/TinyStories").parse_args(argv)
    build_splits(args, lambda row: [row["text"]], ["train", "val"], pairs=False)


if __name__ == "__main__":
    main()
