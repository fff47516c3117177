"""
Other embeddings of the default run's corpus, each as data/docs has them, in the Hugging Face format: data/ablations/table (the trained
encoder's token table: a T5 of no layers), .../gaussian (the same, of random numbers) and .../half (an encoder after a quarter of its steps).

    python config/ablations/encoders.py    # needs data/docs
"""
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT))
from config.machine import run_program  # noqa: E402
import torch  # noqa: E402
from transformers import T5Config, T5EncoderModel  # noqa: E402

from data.encoder import load_encoder, load_tokenizer  # noqa: E402
from data.files import Files  # noqa: E402
from data.rows import open_data  # noqa: E402
from data.scratch import RECIPE, train_encoder  # noqa: E402


def token_table(weight):
    """A T5 encoder of no layers whose token embeddings are `weight` (V, E); like any T5's, its output has unit mean square."""
    V, E = weight.shape
    encoder = T5EncoderModel(T5Config(vocab_size=V, d_model=E, d_kv=E, num_heads=1, num_layers=0, dropout_rate=0.0)).eval()
    encoder.shared.weight.data = weight.detach().clone()
    return encoder


def main(source=ROOT / "data/docs", target=ROOT / "data/ablations"):
    """Makes the three folders in target, of the rows and the tokenizer of source; SystemExit if that is not prepared."""
    train, val, meta = open_data(source)
    tokenizer, table = load_tokenizer(source / "t5"), load_encoder(source / "t5").shared.weight
    half = dict(RECIPE, steps=RECIPE["steps"] // 4)
    random = torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    for name, make in dict(table=lambda: token_table(table), gaussian=lambda: token_table(random),
                           half=lambda: train_encoder(train.tokens.reshape(-1, meta["length"]), len(tokenizer), noise_weight=0.3, **half)).items():
        with Files(target / name, np.uint16) as files:
            for side, rows in dict(train=train, val=val).items():
                for row in rows.tokens.reshape(-1, meta["length"]):
                    files.add(side, [row])
            files.finish("t5", tokenizer, make(), meta["length"], meta["fingerprint"])


if __name__ == "__main__":
    run_program(main)
