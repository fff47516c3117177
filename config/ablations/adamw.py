# AdamW (0.9, 0.95) on all weights instead of Muon on the matrices; run.py tries half and twice this rate too.
from config.ablations.base import *  # noqa: F403

name = "adamw"
optimizer = "adamw"
lr = 0.002
