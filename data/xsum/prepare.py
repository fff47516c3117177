"""XSum, as in the paper: 204,045 BBC articles and their one-sentence summaries."""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.prepare import build_splits, options

def main(argv=None):
    args = options(__doc__, HERE, "EdinburghNLP/xsum").parse_args(argv)
    build_splits(args, lambda row: [row["document"], row["summary"]],
                 revision="refs/convert/parquet")  # the main revision is a script, which is not run

if __name__ == "__main__":
    main()
