# The offline default: plain sentences from the docstrings and comments of the installed packages,
# minutes on 2 CPU cores.
name = "docs"
data = "data/docs"
prepare = "data/docs/prepare.py"
encoder = "data/docs/t5"
length = 12

depth = 4
dim = 256
heads = 4
bottleneck = 64
noise_scale = 0.5    # not 2: the encoder has 64 channels, not 512; with fewer channels, the same
decode_noise = 2.0   # noise leaves less information

steps = 1800
batch_size = 64
lr = 0.008           # far above the paper's 0.002: a short run of a small network needs it
warmup = 60
cooldown = 0.5

# At 32 steps: more noise than in training is put back early, and less and less later, at times that
# chance does not choose. That gives text which is both likely and varied.
sample_gamma = 36.0
sample_gamma_power = 2.0
sample_temperature = 1.9  # 2 for more variety and less sense, 1.8 for the reverse
sample_schedule = "quantile"

val_interval = 600
sample_interval = 600
save_interval = 600
