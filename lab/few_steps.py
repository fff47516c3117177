"""
How fast, how well: the default run at 64 to 1 steps, and its students at 16 to 1.

    python -m lab.few_steps    # after train.py; first trains the five students, in an hour

Prints a table in Markdown and draws few_steps.svg here.
"""
import train
from lab.ablations import measure
from lab.pictures import plt, save

PAPER = "--schedule=quantile --gamma_power=0"
SAMPLERS = {"ODE": f"{PAPER} --temperature=1 --gamma=0",
            "ODE, T 0.6": f"{PAPER} --temperature=0.6 --gamma=0",
            "SDE": f"{PAPER} --temperature=1 --gamma=2", "annealed": "--gamma={annealed}"}
STEPS = [64, 32, 16, 8, 4, 2, 1]

def train_students(before="out/docs"):
    """Trains the five rounds, each from the last student and with the first teacher."""
    for round, steps in enumerate(STEPS[2:]):
        name = f"docs_pd_{steps}"
        train.main(["config/docs_pd.py", f"--name={name}", f"--init_from={before}",
                    f"--student_steps={steps}", f"--teacher_substeps={2 * 2**round}",
                    f"--sample_steps={steps}"])
        before = f"out/{name}"

def main():
    train_students()
    rows = {(name, steps): f"--ckpt=out/docs --steps={steps} {how.format(annealed=36 * steps / 32)}"
            for name, how in SAMPLERS.items() for steps in STEPS}
    rows |= {("student", steps): f"--ckpt=out/docs_pd_{steps}" for steps in STEPS[2:]}
    fig, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    print("| sampler | steps | tokens/s | Gen. PPL | entropy | distinct words |")
    print("|---" * 6 + "|")
    points = {}
    for (name, steps), options in rows.items():
        found, real = measure(options)
        print(f"| {name} | {steps} | {found['tokens_per_s']:,.0f} | {found['gen_ppl']:.1f} | "
              f"{found['entropy']:.3f} | {found['distinct1']:.3f} |", flush=True)
        points.setdefault(name, []).append((found["tokens_per_s"], found["gen_ppl"]))
        axes.annotate(steps, points[name][-1], xytext=(4, 4), textcoords="offset points")
    for name, places in points.items():
        axes.plot(*zip(*places), "o-", label=name)
    axes.axhline(real["gen_ppl"], linestyle=":", color="gray", label="real rows")
    axes.set(xscale="log", yscale="log", xlabel="tokens/s", ylabel="Gen. PPL", title="By steps")
    axes.legend()
    save(fig, "few_steps.svg")

if __name__ == "__main__":
    main()
