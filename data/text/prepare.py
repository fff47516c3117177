"""
Your own text, of any size.

    .txt      documents: paragraphs, with blank lines between them. One of more than 64 KiB is cut into several
    .jsonl    one object a line: {"text": ...}, a document, or {"input": ..., "output": ...}, a pair of condition and target
    .gz       after either: gzip

All files must be UTF-8 and of one kind, documents or pairs. The hash of a document, or of a condition, decides whether it is held out
for validation, so more text later moves none. What the folder held before is replaced only once the new data are complete.

    python data/text/prepare.py book.txt more.jsonl.gz
    python data/text/prepare.py notes.txt --encoder data/docs/t5    # without the Hugging Face hub, after data/docs/prepare.py
"""
import codecs
import gzip
import itertools
import json
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.common import build, options, share  # noqa: E402

LONGEST = 1 << 16  # bytes of a paragraph


def suffix(file):
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def lines(file, longest=-1):
    """(line number, text) of each line; one of more than `longest` bytes comes in pieces that have the same number."""
    number, decoder = 1, codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as f:
            while piece := f.readline(longest):
                yield number, decoder.decode(piece)
                number += piece.endswith(b"\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as e:
        sys.exit(f"{file}: line {number}: not UTF-8 ({e.reason}); convert it, for example with iconv")
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        sys.exit(f"{file}: line {number}: damaged or cut-off gzip ({e})")
    except OSError as e:
        sys.exit(f"{file}: cannot be read ({e.strerror or e})")


def paragraphs(file):
    """Each paragraph of a .txt as (text,)."""
    block, size = [], 0
    for _, text in lines(file, LONGEST):
        blank = not text.strip()
        if not blank:
            block.append(text)
            size += len(text.encode())
        if block and (blank or size >= LONGEST):
            yield ("".join(block),)
            block, size = [], 0
    if block:
        yield ("".join(block),)


def records(file):
    """Each line of a .jsonl as (text,) or (input, output)."""
    for number, line in lines(file):
        if not line.strip():
            continue
        where = f"{file}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            sys.exit(f"{where}: not JSON ({e})")
        record = record if isinstance(record, dict) else {}
        keys = next((keys for keys in (("text",), ("input", "output")) if all(key in record for key in keys)), None)
        if not keys:
            sys.exit(f'{where}: must have "text", or "input" and "output"')
        for key in keys:
            if not isinstance(record[key], str) or not record[key].isascii() and any("\ud800" <= c <= "\udfff" for c in record[key]):
                sys.exit(f'{where}: "{key}" is not text')
        yield tuple(record[key] for key in keys)


READERS = {".txt": paragraphs, ".jsonl": records}


def items(files):
    """(None, texts) of every document or pair; what is not of the first one's kind is refused."""
    kind = None
    for file in files:
        count = 0
        for count, texts in enumerate(READERS[suffix(file)](file), start=1):
            kind = kind or len(texts)
            if len(texts) != kind:
                here, before = ("pairs", "documents") if kind == 1 else ("documents", "pairs")
                sys.exit(f"{file}: {here} here, {before} before; prepare them apart, each into its own --out")
            yield None, texts
        if not count:
            sys.exit(f"{file}: no text in it")


def main(argv=None):
    parser = options(__doc__, HERE)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--val_share", type=share, default=0.01, help="of the documents or pairs, held out for validation (%(default)s)")
    args = parser.parse_args(argv)
    for file in args.files:
        if not file.is_file():
            sys.exit(f"{file}: {'is a folder; name the files in it' if file.is_dir() else 'no such file'}")
        if suffix(file) not in READERS:
            sys.exit(f"{file}: must end in .txt or .jsonl, or either and .gz")
        if not file.stat().st_size:
            sys.exit(f"{file}: empty")
    rows = items(args.files)
    first = next(rows)
    build(args, itertools.chain([first], rows), pairs=len(first[1]) == 2, val_share=args.val_share)


if __name__ == "__main__":
    main()
