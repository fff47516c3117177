"""OpenWebText, as in the paper: 8 million documents, each ended by </s>, end to end; 18 GB."""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.prepare import build, hub_rows, options, side_of

REPO = "Skylion007/openwebtext"

def main(argv=None):
    parser = options(__doc__, HERE, REPO, val_share=0.0005)
    parser.add_argument("--pretokenized", action="store_true", help="the column is input_ids")
    args = parser.parse_args(argv)
    where = dict(revision="refs/convert/parquet") if args.repo == REPO else {}  # main is a script
    rows = hub_rows(args.repo, "train", args.limit, **where)
    column = "input_ids" if args.pretokenized else "text"
    items = ((side_of(str(row[column]), args.val_share), [row[column]]) for row in rows)
    build(args, items, pretokenized=args.pretokenized)

if __name__ == "__main__":
    main()
