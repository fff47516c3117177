"""
Texts from files, for every program that reads some.

    .txt      documents: paragraphs, with blank lines between them, or lines, in a file that begins without a blank one for 64 KiB
    .jsonl    one object a line
    .gz       after either: gzip

All UTF-8, with or without a byte order mark; LF, CR LF and CR end a line, and nothing else does.
"""
import codecs
import contextlib
import functools
import gzip
import json
import math
import os
import re
import sys
import zlib
from pathlib import Path

LONGEST = 1 << 16  # bytes of a document in a .txt; a longer one is cut


def kind_of(file):
    """.txt, .jsonl or another ending, in small letters, without .gz."""
    file = Path(str(file).lower())
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def is_text(value):
    """Whether it is a string that UTF-8 can hold; Python makes lone surrogates of other bytes on a command line."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def lines(file, longest=-1):
    """(line number, text) of each line with its end; one of more than `longest` bytes comes in pieces that have the same number."""
    number, decoder = 1, codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with (gzip.open if str(file).lower().endswith(".gz") else open)(file, "rb") as f:
            for piece in iter(functools.partial(f.readline, longest), b""):
                for text in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", decoder.decode(piece)):
                    yield number, text
                    number += text[-1] in "\r\n"
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as e:
        sys.exit(f"{file}: line {number}: not UTF-8 ({e.reason}); convert it, for example with iconv")
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        sys.exit(f"{file}: line {number}: damaged or cut-off gzip ({e})")
    except (OSError, ValueError) as e:  # ValueError: a name with a null byte
        sys.exit(f"{file}: cannot be read ({getattr(e, 'strerror', None) or e})")


def documents(file):
    """The documents of a .txt."""
    block, size, gap, by_line = [], 0, False, None  # by_line: None until the first block has ended
    for _, text in lines(file, LONGEST):
        if not text.strip():
            gap = True
            continue
        if block and (gap or by_line or size >= LONGEST):
            by_line = not gap if by_line is None else by_line
            yield from block if by_line else ["".join(block)]
            block, size = [], 0
        block.append(text)
        size += len(text.encode())
        gap = False
    if block:
        yield from ["".join(block)] if by_line is False else block


def records(file, *alternatives, optional=()):
    """
    The objects of a .jsonl, each with text under all the keys of one of the alternatives, and text or null under the optional ones.
    raises   SystemExit with one line that names the first that has not
    """
    for number, line in lines(file):
        if not line.strip():
            continue
        where = f"{file}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            sys.exit(f"{where}: not JSON ({e})")
        keys = next((keys for keys in alternatives if isinstance(record, dict) and all(key in record for key in keys)), None)
        if keys is None:
            sys.exit(f"{where}: must have " + ", or ".join(" and ".join(f'"{key}"' for key in keys) for keys in alternatives))
        for key in (*keys, *optional):
            value = record.get(key)
            if not is_text(value) and not (value is None and key in optional):
                sys.exit(f'{where}: "{key}" is not text')
        yield record


def read_samples(file):
    """What sample.py --out wrote, or anyone else: texts, some perhaps with a reference."""
    return list(records(file, ("text",), optional=("reference", "data", "encoder", "tokenizer", "ckpt"))) or sys.exit(f"{file}: is empty")


def read_conditions(source, n):
    """Records of a `cond` and perhaps a `reference`: the text itself, n times; or the lines of a .txt or .jsonl file, the first n of them."""
    if kind_of(source) == ".jsonl":
        found = [dict(cond=record["input"]) | (dict(reference=record["output"]) if record.get("output") is not None else {})
                 for record in records(source, ("input",), optional=("output",))]
    elif kind_of(source) == ".txt":
        found = [dict(cond=text.rstrip("\r\n")) for _, text in lines(source)]
    elif is_text(source):
        return [dict(cond=source) for _ in range(n or 4)]
    else:
        sys.exit(f"--cond {source!r}: is not UTF-8")
    return found[:n] or sys.exit(f"--cond {source}: is empty")


def read_figures(path, *keys):
    """The records of a .jsonl file with finite numbers under these keys; what else there is, such as a line cut short, is passed over."""
    for _, line in lines(path):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and all(type(record.get(key)) in (int, float) and math.isfinite(record[key]) for key in keys):
            yield record


def open_to_append(path):
    """A .jsonl file to append to: on a line of its own, even if the last one was cut short."""
    cut = False
    if os.path.isfile(path) and os.path.getsize(path):
        with open(path, "rb") as f:
            f.seek(-1, os.SEEK_END)
            cut = f.read() != b"\n"
    f = open(path, "a")
    f.write("\n" * cut)
    return f


def refuse_to_overwrite(option, path, force):
    """Ends the program if path, given by this option, is there and not to be lost, or cannot be written."""
    if os.path.isdir(path) or os.path.exists(path) and not force:
        sys.exit(f"{option} {path}: exists already; name another file, or overwrite it with --force")
    try:
        open(f"{path}.tmp", "w").close()
        os.unlink(f"{path}.tmp")
    except (OSError, ValueError) as e:
        sys.exit(f"{option} {path}: cannot be written ({getattr(e, 'strerror', None) or e}); name another file")


def write_jsonl(path, found):
    """All records into path; if that fails path is left alone, they are printed, and the program ends."""
    write_whole(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found))


def write_whole(path, text):
    """The text into path; if that fails path is left alone, the text is printed, and the program ends."""
    try:
        with open(f"{path}.tmp", "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(f"{path}.tmp", path)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.tmp")
        print(text, end="")
        sys.exit(f"{path}: cannot be written ({e.strerror}); what it would hold is above")
