# Code -> docstring: the first sentence of a docstring from the signature above it; offline, minutes on 2 CPU cores.
name = "docs_cond"
data = "data/docs_cond"
prepare = "data/docs_cond/prepare.py"
encoder = "data/docs_cond/t5"
length = 30
cond_length = 14

depth = 6
dim = 192
heads = 6
bottleneck = 64
noise_scale = 0.5

steps = 1200
batch_size = 64
lr = 0.008
warmup = 60
cooldown = 0.5

sample_steps = 32
sample_gamma = 30.0
sample_gamma_power = 2.0
sample_temperature = 1.5
sample_schedule = "quantile"
sample_w = 3.0
sample_cfg = 1.5

val_interval = 300
sample_interval = 300
save_interval = 300
