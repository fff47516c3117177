# The offline default: plain sentences of the installed packages' docstrings and comments, minutes on 2 CPU cores.
name = "docs"
data = "data/docs"
prepare = "data/docs/prepare.py"
encoder = "data/docs/t5"
length = 12

depth = 4
dim = 256
heads = 4
bottleneck = 64
noise_scale = 0.5    # not 2: the encoder has 64 channels instead of 512, and the information left at a given noise falls with them
decode_noise = 2.0   # likewise

steps = 1800
batch_size = 64
lr = 0.008           # far above the paper's 0.002: a short run of a small network needs it (see README.md here)
warmup = 60
cooldown = 0.5

# At 32 steps: much noise put back early and ever less later, more than in training, at times that chance does not choose.
# That gives text which is both likely and varied (see README.md here).
sample_gamma = 36.0
sample_gamma_power = 2.0
sample_temperature = 1.9  # 2 for more variety and less sense, 1.8 for the reverse
sample_schedule = "quantile"

val_interval = 600
sample_interval = 600
save_interval = 600
