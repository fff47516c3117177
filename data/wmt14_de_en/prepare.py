"""
WMT14 German to English, as in the paper: 4.5 million pairs, tokenised for t5-small.

    pip install datasets
    python data/wmt14_de_en/prepare.py --limit 10000 --out data/wmt_trial    # or all of it
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.prepare import build_splits, options  # noqa: E402


def main(argv=None):
    args = options(__doc__, HERE, "wmt/wmt14").parse_args(argv)
    build_splits(args, lambda row: [row["translation"]["de"], row["translation"]["en"]], name="de-en")


if __name__ == "__main__":
    main()
