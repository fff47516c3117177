# ELF-B on XSum, article -> summary, as in the paper (Tab. 1 and 4).
# torchrun --nproc_per_node=8 train.py config/xsum.py
name = "xsum"
data = "data/xsum"
encoder = "t5-small"
length = 1088
cond_length = 1024
decode_noise = 1.0

steps = 39_900        # 100 epochs of 204,045 pairs
batch_size = 512      # 64 rows on each of 8 GPUs
lr = 0.002
warmup = 5_000

sample_steps = 64
sample_gamma = 0.0
sample_w = 1.0
sample_cfg = 2.0
