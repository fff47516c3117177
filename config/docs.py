# The offline default: sentences of the installed packages' docstrings and comments, minutes on 2 CPU cores.
name = "docs"
data = "data/docs"
prepare = "data/docs/prepare.py"
encoder = "data/docs/t5"
length = 18

depth = 6
dim = 192
heads = 6
bottleneck = 64
noise_scale = 0.7    # not 2, and decode_noise not 5: the encoder has 64 channels instead of 512, and what noise leaves readable falls with them
decode_noise = 2.0

steps = 2000
batch_size = 64
lr = 0.008           # far above the paper's 0.002: a short run of a small network needs it (see README.md here)
warmup = 60
cooldown = 0.5

sample_gamma = 12.0  # much noise early, ever less towards the end, and more than in training: true and varied text (see README.md here)
sample_gamma_power = 1.0
sample_temperature = 1.6

val_interval = 500
sample_interval = 500
save_interval = 500
