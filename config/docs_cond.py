# Code -> docstring: the first sentence of a docstring from the signature above it; offline, minutes on 2 CPU cores.
name = "docs_cond"
data = "data/docs_cond"
prepare = "data/docs_cond/prepare.py"
encoder = "data/docs_cond/t5"
length = 26
cond_length = 12

depth = 4
dim = 256
heads = 4
bottleneck = 64
noise_scale = 0.7
decode_noise = 1.0

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
sample_cfg = 2.0

val_interval = 600
sample_interval = 600
save_interval = 600
