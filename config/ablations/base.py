# What the ablations change one thing of: the default run with a quarter of its steps, so that each takes minutes on 2 CPU cores.
from config.docs import *  # noqa: F403

out = "out/ablations"
name = "base"
steps = 450
val_interval = 150
sample_interval = 450
save_interval = 450
