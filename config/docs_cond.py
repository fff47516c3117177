# Code to docstring, offline, in minutes on 2 CPU cores: a signature is the condition, the first
# sentence of the docstring its target.
base = "config/docs.py"
name = "docs_cond"
data = "data/docs_cond"
prepare = "data/docs_cond/prepare.py"
encoder = "data/docs_cond/t5"
length = 26
cond_length = 12
noise_scale = 0.7
decode_noise = 1.0
steps = 1200

sample_gamma = 30.0
sample_temperature = 1.5
sample_cfg = 2.0
