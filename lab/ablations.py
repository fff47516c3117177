"""
The paper's ablations at the default run's size: each changes one thing of a quarter of that run.

    python -m lab.ablations predict_v adamw    # some, or all, which takes hours on 2 CPU cores

Runs lie in out/ablations, and are resumed. The table is of 3 seeds of 464 samples by 16 SDE steps.
"""
import runtime  # first: before torch
import json
import tempfile
from pathlib import Path

import numpy as np

from transformers import T5Config, T5EncoderModel

import eval
import sample
import train
from config import ROOT
from data.encoder import load_encoder, load_tokenizer
from data.prepare import replacing, write_folder
from data.rows import open_rows
from data.scratch import RECIPE, train_encoder

QUARTER = "--steps=450 --val_interval=150 --save_interval=450 --out=out/ablations"
PAPER = "--gamma=2 --gamma_power=0 --temperature=1 --schedule=quantile --steps=16"
TRIALS = dict(
    base="", seed_1="--seed=1", seed_2="--seed=2",
    predict_v="--predict=v", predict_eps="--predict=eps",
    bottleneck_16="--bottleneck=16", bottleneck_32="--bottleneck=32", dim_128="--dim=128",
    dim_384="--dim=384 --heads=6", t_mean_m05="--t_mean=-0.5", t_mean_m25="--t_mean=-2.5",
    decode_share_1="--decode_share=0.1 --self_cond_share=0.45",
    decode_share_4="--decode_share=0.4 --self_cond_share=0.3",
    decode_share_8="--decode_share=0.8 --self_cond_share=0.1", decode_noise_05="--decode_noise=0.5",
    decode_noise_5="--decode_noise=5", muon_004="--lr=0.004", muon_016="--lr=0.016",
    adamw="--optimizer=adamw --lr=0.002", adamw_001="--optimizer=adamw --lr=0.001")
TRIALS |= {f"encoder_{name}": f"--data=data/ablations/{name} --encoder=data/ablations/{name}/t5"
           for name in ("table", "gaussian", "half")}

def measure(options, n=464, seeds=3):
    """Returns mean figures of samples with these options of sample.py, and those of real rows."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{seed}.jsonl" for seed in range(seeds)]
        for seed, file in enumerate(files):
            sample.main([*options.split(), f"--n={n}", f"--seed={seed}", f"--out={file}"])
        sampled, [real] = eval.main([*files, "--scorer=data/docs/scorer"])
        for figures, file in zip(sampled, files):
            first = json.loads(Path(file).read_text().split("\n")[0])
            figures["tokens_per_s"] = first["tokens_per_s"]
    return {key: float(np.mean([each[key] for each in sampled])) for key in sampled[0]}, real

def make_encoders(source=ROOT / "data/docs", target=ROOT / "data/ablations"):
    """Prepares source's rows with a token table, random numbers and a half-trained encoder."""
    tokenizer, table = load_tokenizer(source / "t5"), load_encoder(source / "t5").shared.weight
    rows = {side: open_rows(source, side) for side in ("train", "val")}
    V, E = table.shape
    bare = T5Config(vocab_size=V, d_model=E, d_kv=E, num_heads=1, num_layers=0)  # no context
    encoders = dict(table=T5EncoderModel(bare), gaussian=T5EncoderModel(bare))
    encoders["table"].shared.weight.data = table.clone()
    encoders["gaussian"].shared.weight.data.normal_(generator=runtime.seeded(0))
    encoders["half"] = train_encoder(rows["train"].tokens.reshape(-1, rows["train"].L), V,
                                     noise_weight=0.3, **RECIPE | dict(steps=RECIPE["steps"] // 4))
    for name, encoder in encoders.items():
        L = rows["train"].L
        each = ((side, [row]) for side in rows for row in rows[side].tokens.reshape(-1, L))
        with replacing(target / name) as folder:
            write_folder(folder, each, tokenizer, "t5", encoder.eval(), length=L)

def main(argv=None):
    parser = runtime.parser(__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(TRIALS))
    names = parser.parse_args(argv).names or [*TRIALS]
    table = "| | Gen. PPL | entropy | distinct words | val MSE | val CE |\n" + "|---" * 6 + "|"
    for name in names:
        if name.startswith("encoder") and not (ROOT / "data/ablations/half/meta.json").is_file():
            make_encoders()
        train.main(["config/docs.py", *QUARTER.split(), *TRIALS[name].split(), f"--name={name}"])
        found, _ = measure(f"--ckpt=out/ablations/{name} {PAPER}")
        log = (ROOT / "out/ablations" / name / "log.jsonl").read_text().splitlines()
        found |= [entry for entry in map(json.loads, log) if "val_mse" in entry][-1]
        table += f"\n| {name} | {found['gen_ppl']:.1f}"
        for key in ("entropy", "distinct1", "val_mse", "val_ce"):
            table += f" | {found[key]:.3f}"
    print(table)

if __name__ == "__main__":
    main()
