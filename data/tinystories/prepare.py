"""TinyStories: two million stories in the words of small children."""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.prepare import build_splits, options

def main(argv=None):
    args = options(__doc__, HERE, "roneneldan/TinyStories").parse_args(argv)
    build_splits(args, lambda row: [row["text"]], ["train", "val"], pairs=False)

if __name__ == "__main__":
    main()
