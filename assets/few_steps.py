"""
How fast, how well: the default run by four samplers at 64 to 1 steps, its students at 16 to 1 (config/docs_pd.py), and the autoregressive
scorer, one after another on this machine: a table in Markdown, and few_steps.svg beside this file.

    python assets/few_steps.py              # of out/docs and out/docs_pd_*; 3 seeds of 464 samples each, as many as there are odd validation rows
    python assets/few_steps.py --n 128      # options of eval.py, for all of them
"""
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent))
import eval  # noqa: E402
from assets.pictures import pyplot, save  # noqa: E402
from config import docs  # noqa: E402
from config.machine import run_program  # noqa: E402

BASE, STUDENT = "out/docs", "out/docs_pd_{}"
AS_PAPER = ["--preset", "paper", "--schedule", "quantile"]
SAMPLERS = {
    "ODE": lambda steps: [*AS_PAPER, "--gamma", "0"],
    "ODE, T 0.6": lambda steps: [*AS_PAPER, "--gamma", "0", "--temperature", "0.6"],
    "SDE": lambda steps: AS_PAPER,
    "annealed": lambda steps: ["--gamma", str(docs.sample_gamma * steps / 32)],  # what counts is gamma times the step
}
STEPS = [64, 32, 16, 8, 4, 2, 1]
COLUMNS = dict(tokens_per_s="{:,.0f}", gen_ppl="{:.1f}", entropy="{:.3f}", distinct1="{:.3f}", distinct2="{:.3f}", invented="{:.3f}")


def measure(argv, options):
    """What eval.py returns for these arguments, which it also appends to results.jsonl."""
    return eval.main([*argv, "--n", "464", "--seeds", "3", *options])


def main(options=None):
    options = sys.argv[1:] if options is None else options
    figures = {}
    for name, how in SAMPLERS.items():
        for steps in STEPS:
            figures[name, steps] = measure(["--ckpt", BASE, "--steps", str(steps), *how(steps)], options)
    for steps in STEPS[2:]:
        figures["student", steps] = measure(["--ckpt", STUDENT.format(steps), "--steps", str(steps)], options)
    figures["autoregressive", ""] = measure(["--ckpt", BASE, "--ar"], options)
    first = figures["ODE", STEPS[0]]
    figures["real rows", ""] = {key.removeprefix("real_"): value for key, value in first.items() if key.startswith("real_")}
    print("| sampler | steps | " + " | ".join(COLUMNS) + " |\n" + "|---" * (2 + len(COLUMNS)) + "|")
    for (name, steps), row in figures.items():
        print("", name, steps, *(form.format(row[key]) if key in row else "" for key, form in COLUMNS.items()), "", sep=" | ")
    draw(figures)


def draw(figures):
    fig, axes = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for name in [*SAMPLERS, "student"]:
        points = [(row["tokens_per_s"], row["gen_ppl"], steps) for (of, steps), row in figures.items() if of == name]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", label=name)
        for x, y, steps in points:
            axes.annotate(steps, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.axhline(figures["real rows", ""]["gen_ppl"], linestyle=":", color="gray", label="real rows")
    axes.axvline(figures["autoregressive", ""]["tokens_per_s"], linestyle="--", color="gray", label="autoregressive")
    axes.set(xscale="log", yscale="log", xlabel="tokens/s", ylabel="Gen. PPL", title="The numbers are steps")
    axes.legend()
    save(fig, HERE / "few_steps.svg")


if __name__ == "__main__":
    run_program(main)
