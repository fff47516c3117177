"""WMT14 German to English, as in the paper: 4.5 million pairs."""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.prepare import build_splits, options

def main(argv=None):
    args = options(__doc__, HERE, "wmt/wmt14").parse_args(argv)
    build_splits(args, lambda row: list(map(row["translation"].get, ("de", "en"))), name="de-en")

if __name__ == "__main__":
    main()
