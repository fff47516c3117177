"""
The ablations of this folder: trains each at equal compute, scores it, and prints the table of README.md.

    python config/ablations/run.py                      # all of them: hours on 2 CPU cores
    python config/ablations/run.py predict_v adamw      # some
    python config/ablations/run.py samplers             # those of the sampler, with the default run, out/docs: minutes

Runs lie in out/ablations, where each goes on as any run does; figures are collected in out/ablations/results.jsonl, and the table has all
that are there.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import eval  # noqa: E402
from checkpoint import find_checkpoints  # noqa: E402
from config.ablations import encoders  # noqa: E402
from config.machine import run_program, run_script  # noqa: E402
from data.texts import open_to_append, read_figures  # noqa: E402

OUT = ROOT / "out" / "ablations"
SCORED = ["--n", "464", "--seeds", "3", "--scorer", "data/docs/scorer"]
SCORED += ["--preset", "paper", "--schedule", "quantile", "--steps", "16"]  # SDE, gamma 2, w 3
TRAINED = {file.stem: [[]] for file in sorted(HERE.glob("*.py")) if file.stem not in ("run", "encoders")}
TRAINED["base"] += [["--lr=0.004"], ["--lr=0.016"]]
TRAINED["adamw"] += [["--lr=0.001"], ["--lr=0.004"]]
for name in ("base", "adamw", "predict_v", "bottleneck_16", "bottleneck_32", "dim_128", "dim_384"):  # where one run says too little
    TRAINED[name] += [["--seed=1"], ["--seed=2"]]
SAMPLED = [["--w", w, "--gamma", gamma] for w in "135" for gamma in "01248"]
SAMPLED += [["--steps", steps, "--gamma", gamma] for steps in ("4", "8", "32") for gamma in "02"]
SAMPLED += [["--schedule", schedule] for schedule in ("logit-normal", "uniform")]
COLUMNS = dict(val_mse="{:.3f}", val_ce="{:.3f}", gen_ppl="{:.1f}", entropy="{:.3f}", distinct1="{:.3f}", invented="{:.3f}")


def train(name, options):
    """A run of one config of this folder with these options, its name made of both; returns it, and its last validation losses."""
    run = "".join([name] + [option.replace("--", "_").replace("=", "_") for option in options])
    command = [ROOT / "train.py", f"config/ablations/{name}.py", *options, f"--name={run}"]
    if code := run_script(command, patience=60):
        sys.exit(f"{' '.join(map(str, command))}: ended with {code}")
    *_, last = read_figures(OUT / run / "log.jsonl", "val_mse", "val_ce")
    return run, {key: last[key] for key in ("val_mse", "val_ce")}


def keep(trial, figures):
    OUT.mkdir(parents=True, exist_ok=True)
    with open_to_append(OUT / "results.jsonl") as f:
        f.write(json.dumps(dict(trial=trial) | figures) + "\n")


def print_table():
    print("| trial | " + " | ".join(COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|")
    rows = {row["trial"]: row for row in read_figures(OUT / "results.jsonl", "gen_ppl") if "trial" in row}  # the last of each
    for trial, row in sorted(rows.items()):
        print("", trial, *(form.format(row[key]) if key in row else "" for key, form in COLUMNS.items()), "", sep=" | ")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args(argv).names or ["base", *TRAINED, "samplers"]
    if unknown := [name for name in asked if name not in TRAINED and name != "samplers"]:
        sys.exit(f"{unknown[0]}: no such ablation; there are: samplers, {', '.join(TRAINED)}")
    eval.scorer_name(None, "data/docs")  # what is missing is found out now, not after hours
    if "samplers" in asked:
        find_checkpoints("out/docs")
    for name in dict.fromkeys(asked):
        if name.startswith("encoder_") and not (ROOT / "data/ablations/half/meta.json").is_file():
            encoders.main()
        for options in TRAINED.get(name, []):
            run, losses = train(name, options)
            keep(run, eval.main(["--ckpt", f"out/ablations/{run}", *SCORED]) | losses)
        for options in SAMPLED if name == "samplers" else []:
            keep("sampled with " + " ".join(options), eval.main(["--ckpt", "out/docs", *SCORED, *options]))
    print_table()


if __name__ == "__main__":
    run_program(main)
