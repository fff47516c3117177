# ELF-M on OpenWebText, as in the paper (Tab. 3 and 4): 343 M parameters.
# torchrun --nproc_per_node=8 train.py config/owt_m.py
name = "owt_m"
data = "data/openwebtext"
encoder = "t5-small"
length = 1024

depth = 24
dim = 1056
heads = 16
bottleneck = 128

steps = 76_000        # 4 epochs
batch_size = 512      # with accum = 2: 32 rows at a time on each of 8 GPUs
accum = 2
lr = 0.002
warmup = 9_500        # half an epoch
