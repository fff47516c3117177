# ELF-B on OpenWebText, as in the paper (Tab. 3 and 4): 105 M parameters.
# torchrun --nproc_per_node=8 train.py config/owt_b.py
name = "owt_b"
data = "data/openwebtext"
encoder = "t5-small"
length = 1024

depth = 12
dim = 768
heads = 12
bottleneck = 128

steps = 95_000        # 5 epochs: 95 K x 512 x 1024 tokens
batch_size = 512      # 64 rows on each of 8 GPUs
lr = 0.002
warmup = 9_500        # half an epoch
