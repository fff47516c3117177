"""
Draws losses.svg here, from the logs of these runs.

    python -m lab.pictures out/docs out/mine
"""
import json
import sys
from pathlib import Path

import numpy as np

try:
    import matplotlib
except ImportError:
    sys.exit("matplotlib is missing: pip install matplotlib")
matplotlib.use("svg")
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "elf"}  # the same file each time
import matplotlib.pyplot as plt

def save(fig, name):
    fig.savefig(Path(__file__).with_name(name), metadata={"Date": None})

def draw_losses(runs):
    """Draws MSE and CE over the steps: lines for training (means of 10), dots for validation."""
    fig, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for run in runs:
        entries = map(json.loads, (Path(run) / "log.jsonl").read_text().splitlines())
        log = {entry["step"]: entry for entry in entries}.values()  # of a step, the last counts
        for axes, loss in zip(panels, ("mse", "ce")):
            trained = np.array([(entry["step"], entry[loss]) for entry in log if loss in entry])
            means = trained[:len(trained) // 10 * 10].reshape(-1, 10, 2).mean(1)
            [line] = axes.plot(*means.T, label=f"{run}, training")
            key = f"val_{loss}"
            held_out = [(entry["step"], entry[key]) for entry in log if key in entry]
            axes.plot(*zip(*held_out), "o", color=line.get_color(), label="validation")
            axes.set(title=loss.upper(), xlabel="step", yscale="log")
    panels[0].legend()
    save(fig, "losses.svg")

if __name__ == "__main__":
    draw_losses(sys.argv[1:] or ["out/docs"])
