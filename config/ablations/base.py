# What the ablations change one thing of: the default run with a third of its steps, so that each takes minutes on 2 CPU cores.
from config.docs import *  # noqa: F403

out = "out/ablations"
name = "base"
steps = 600
val_interval = 300
sample_interval = 600
save_interval = 600
