"""
Code -> docstring: the offline task with a condition. From the same installed packages as data/docs, pairs of a function's or class's
signature and the first sentence of its docstring, with a tokenizer and an encoder of their own, made by the same recipe.

    python data/docs_cond/prepare.py   # `python train.py config/docs_cond.py` runs it by itself

The side of a pair, train or val, depends on the name of the function or class alone: no name is on both.
"""
import ast
import hashlib
import os
import re
import sys
import warnings
from multiprocessing import Pool
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.common import EOS, to_rows, train_encoder, train_tokenizer, write_dataset  # noqa: E402
from data.docs.prepare import prose, source_files  # noqa: E402
