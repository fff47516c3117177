"""
Your own text, of any size: .txt files of documents, and .jsonl files of {"text": ...}, a document a line, or of {"input": ..., "output": ...},
a pair of condition and target; also with .gz after either. data/texts.py says what separates documents.

All files must be of one kind, documents or pairs. The hash of a document, or of a condition, decides whether it is held out for
validation, so more text later moves none. What the folder held before is replaced only once the new data are complete.

    python data/text/prepare.py book.txt more.jsonl.gz
    python data/text/prepare.py mine.txt --encoder scratch          # without the Hugging Face hub: a tokenizer and an encoder of its own
    python data/text/prepare.py notes.txt --encoder data/docs/t5    # or those of data/docs/prepare.py, whose words are few
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from config.machine import run_program  # noqa: E402
from data.files import build, options, share  # noqa: E402
from data.scratch import make_t5  # noqa: E402
from data.texts import documents, kind_of, records  # noqa: E402

MOST = 20_000_000  # characters that --encoder scratch learns from


def read(file):
    """Each document of a file as (text,), each pair as (input, output)."""
    if kind_of(file) == ".txt":
        return ((text,) for text in documents(file))
    return ((record["text"],) if "text" in record else (record["input"], record["output"])
            for record in records(file, ("text",), ("input", "output")))


def items(files):
    """(None, texts) of every document or pair; what is not of the first one's kind is refused."""
    parts = None
    for file in files:
        count = 0
        for count, texts in enumerate(read(file), start=1):
            parts = parts or len(texts)
            if len(texts) != parts:
                here, before = ("pairs", "documents") if parts == 1 else ("documents", "pairs")
                sys.exit(f"{file}: {here} here, {before} before; prepare them apart, each into its own --out")
            yield None, texts
        if not count:
            sys.exit(f"{file}: no text in it")


def first_texts(files):
    """The texts at the beginning of the files, as many as a tokenizer and an encoder learn from."""
    texts, size = [], 0
    for _, parts in items(files):
        texts += parts
        size += sum(map(len, parts))
        if size > MOST:
            break
    return texts


def main(argv=None):
    parser = options(__doc__, HERE)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--val_share", type=share, default=0.01, help="of the documents or pairs, held out for validation (%(default)s)")
    args = parser.parse_args(argv)
    for file in args.files:
        if not file.is_file():
            sys.exit(f"{file}: {'is a folder; name the files in it' if file.is_dir() else 'no such file'}")
        if kind_of(file) not in (".txt", ".jsonl"):
            sys.exit(f"{file}: must end in .txt or .jsonl, or either and .gz")
        if not file.stat().st_size:
            sys.exit(f"{file}: empty")
    pairs = len(next(items(args.files))[1]) == 2
    made = make_t5(first_texts(args.files)) if args.encoder == "scratch" else None
    build(args, items(args.files), pairs, args.val_share, made=made)


if __name__ == "__main__":
    run_program(main)
