"""
Your own text, in UTF-8: .txt files, with a blank line between documents, and .jsonl files, with
{"text": ...} or, for pairs, {"input": ..., "output": ...} in each line. Either may be a .gz.
"""
import gzip
import itertools
import json
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.prepare import build, options, side_of
from data.scratch import make_t5

def read(files):
    """Yields the documents [text] or pairs [input, output] of all files."""
    for file in files:
        number = 0
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rt", encoding="utf-8-sig") as lines:
            try:
                if ".txt" in file.suffixes:
                    for blank, group in itertools.groupby(lines, lambda line: not line.strip()):
                        if not blank:
                            yield ["".join(group)]
                    continue
                for number, line in enumerate(lines, start=1):
                    record = json.loads(line)
                    keys = ["text"] if "text" in record else ["input", "output"]
                    if not all(isinstance(record[key], str) for key in keys):
                        raise TypeError("not a string")
                    yield [record[key] for key in keys]
            except (ValueError, KeyError, TypeError) as error:  # UnicodeDecodeError: a ValueError
                sys.exit(f"{file}, line {number}: not UTF-8 text or such an object ({error})")

def main(argv=None):
    parser = options(__doc__, HERE, val_share=0.01)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    for file in args.files:
        if not file.is_file() or not {".txt", ".jsonl"} & set(file.suffixes):
            sys.exit(f"{file}: not a .txt or .jsonl file, or one of these with .gz")
    kinds = {len(texts) for texts in read(args.files)}
    if len(kinds) != 1:
        sys.exit("documents and pairs do not mix; prepare each into its own --out" if kinds else
                 f"{args.files[0]}: no text in it")
    made = None
    if args.encoder == "scratch":
        made = make_t5(text for texts in read(args.files) for text in texts)
    items = ((side_of(texts[0], args.val_share), texts) for texts in read(args.files))
    build(args, items, kinds == {2}, made)

if __name__ == "__main__":
    main()
