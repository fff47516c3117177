# AdamW (0.9, 0.95) on all weights instead of Muon on the matrices; the rate is the best of run.py's sweep.
from config.ablations.base import *  # noqa: F403

name = "adamw"
optimizer = "adamw"
lr = 0.002
