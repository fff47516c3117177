"""
The lesson's pictures: losses.svg, from the log.jsonl of out/docs, and variety.svg, Gen. PPL against variety as the sampler changes, from what
`python config/ablations/run.py samplers` collects. Or losses.svg of other runs, in the folder of the first.

    python assets/pictures.py
    python assets/pictures.py out/mine out/docs
"""
import argparse
import sys
from operator import itemgetter
from pathlib import Path

HERE = Path(__file__).absolute().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
from config.machine import run_program  # noqa: E402
from data.texts import read_figures  # noqa: E402

RESULTS = ROOT / "out" / "ablations" / "results.jsonl"


def pyplot():
    """matplotlib's, for drawing to files; SystemExit if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("matplotlib is not installed, and pictures need it: pip install matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "elf"})  # letters stay letters, and the same picture the same file
    import matplotlib.pyplot as plt
    return plt


def plain_numbers(axes):
    """0.5 and not 5 x 10^-1 at some of the ticks."""
    axes.yaxis.set_minor_locator(pyplot().LogLocator(subs=(2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def save(fig, path):
    try:
        fig.savefig(path, metadata={"Date": None})
    except OSError as e:
        sys.exit(f"{path}: cannot be written ({e.strerror})")
    print(path, file=sys.stderr)


def draw_losses(runs, folder, window=10):
    """Of each run, {label: its folder}, MSE and CE over the steps: a line for training, means of `window` entries; dots for validation rows."""
    fig, panels = pyplot().subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axes, loss, title in zip(panels, ("mse", "ce"), ("MSE of the velocity", "CE of the tokens")):
        for label, run in runs.items():
            log = run / "log.jsonl"
            trained = [(entry["step"], entry[loss]) for entry in read_figures(log, "step", loss)] or sys.exit(f"{log}: has no losses yet")
            parts = [trained[i:i + window] for i in range(0, len(trained), window)]
            [line] = axes.plot(*zip(*([sum(values) / len(part) for values in zip(*part)] for part in parts)), label=f"{label}, training")
            validated = [(entry["step"], entry[f"val_{loss}"]) for entry in read_figures(log, "step", f"val_{loss}")]
            if validated:
                axes.plot(*zip(*validated), "o", color=line.get_color(), label=f"{label}, validation, averaged weights")
        axes.set(title=title, xlabel="step", yscale="log")
        plain_numbers(axes)
    panels[0].legend()
    save(fig, folder / "losses.svg")


def draw_variety(rows):
    """Gen. PPL against distinct words, both relative to real rows: for each w as gamma changes, for ODE and SDE as the steps do."""
    lines = {f"w = {w}, 16 steps, γ as written": ("gamma", "γ {:g}", [row for row in rows if (row["w"], row["steps"]) == (w, 16)])
             for w in (1, 3, 5)}
    lines |= {f"{name}, w = 3, steps as written": ("steps", "{}", [row for row in rows if (row["w"], row["gamma"]) == (3, gamma)])
              for name, gamma in dict(ODE=0, SDE=2).items()}
    fig, axes = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for label, (key, form, points) in lines.items():
        points = sorted(points, key=itemgetter(key))
        places = [(row["distinct1"] / row["real_distinct1"], row["gen_ppl"] / row["real_gen_ppl"]) for row in points]
        if places:
            axes.plot(*zip(*places), "o-" if key == "gamma" else "s--", label=label)
        for row, place in zip(points, places):
            if key == "steps" or row["w"] == 1:  # of the lines along gamma, which lie close together, the first
                at = dict(xytext=(6, -9)) if key == "steps" else dict(xytext=(-6, 4), ha="right")
                axes.annotate(form.format(row[key]), place, textcoords="offset points", fontsize=8, **at)
    axes.plot(1, 1, "*", color="black", markersize=12, label="real rows")
    axes.set(xlabel="distinct words, relative to real rows", ylabel="Gen. PPL, relative to real rows", yscale="log")
    plain_numbers(axes)
    axes.legend()
    save(fig, HERE / "variety.svg")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*")
    if runs := parser.parse_args(argv).runs:
        return draw_losses({run: Path(run) for run in runs}, Path(runs[0]))
    draw_losses({"out/docs": ROOT / "out/docs"}, HERE)
    found = read_figures(RESULTS, "steps", "gamma", "w", "distinct1", "real_distinct1", "gen_ppl", "real_gen_ppl") if RESULTS.is_file() else ()
    rows = {row["trial"]: row for row in found if str(row.get("trial")).startswith("sampled with") and row.get("schedule") == "quantile"}
    if not rows:
        sys.exit(f"{RESULTS}: has no samplers yet, so variety.svg is not drawn; first: python config/ablations/run.py samplers")
    draw_variety(list(rows.values()))  # the last of each trial


if __name__ == "__main__":
    run_program(main)
