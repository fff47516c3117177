# ELF-B on WMT14 German to English, as in the paper (Tab. 1 and 4).
# torchrun --nproc_per_node=8 train.py config/de_en.py
name = "de_en"
data = "data/wmt14_de_en"
length = 128
cond_length = 64
decode_noise = 1.0

steps = 880_000       # 100 epochs of 4.5 M pairs
warmup = 5_000

sample_steps = 64
sample_gamma = 0.0
sample_w = 1.0
sample_cfg = 2.0
