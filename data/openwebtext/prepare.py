"""
OpenWebText as the paper uses it: documents tokenised for t5-small, each ended with </s>, all end to end; train.py cuts rows of 1,024.

A document's side, train or val, depends on its own text alone. An interrupted run leaves nothing behind; run again, it starts anew.

    pip install datasets
    python data/openwebtext/prepare.py                                       # 8 million documents, 9 billion tokens, 18 GB
    python data/openwebtext/prepare.py --limit 20000 --out data/owt_trial    # a trial, a few minutes
    python data/openwebtext/prepare.py --pretokenized embedded-language-flows/openwebtext-t5    # the authors' tokens, as they are
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from config.machine import run_program  # noqa: E402
from data.files import build, columns, hub, options, share  # noqa: E402

REPO, REVISION = "Skylion007/openwebtext", "refs/convert/parquet"  # `datasets` no longer runs the script of the main revision
VAL_SHARE, TRIAL_VAL_SHARE = 0.0005, 0.05


def main(argv=None):
    parser = options(__doc__, HERE, REPO)
    parser.add_argument("--val_share", type=share, help=f"of the documents ({VAL_SHARE}; {TRIAL_VAL_SHARE} with --limit)")
    parser.add_argument("--pretokenized", metavar="REPO", help="a dataset, or folder of Parquet files, with a column input_ids")
    args = parser.parse_args(argv)
    repo, tokens = args.pretokenized or args.repo, bool(args.pretokenized)
    [(_, rows)], total = hub(repo, {"train": "train"}, args.limit, revision=None if repo != REPO else REVISION)
    items = ((None, row) for row in columns(repo, rows, *(["input_ids"] if tokens else ["text"]), kind=list if tokens else str))
    build(args, items, val_share=args.val_share or (TRIAL_VAL_SHARE if args.limit else VAL_SHARE), total=total, pretokenized=tokens)


if __name__ == "__main__":
    run_program(main)
