# ELF-L on OpenWebText, as in the paper (Tab. 3 and 4): 652 M parameters.
# torchrun --nproc_per_node=8 train.py config/owt_l.py
name = "owt_l"
data = "data/openwebtext"
encoder = "t5-small"
length = 1024

depth = 32
dim = 1280
heads = 16
bottleneck = 128

steps = 57_000        # 3 epochs
batch_size = 512      # with accum = 4: 16 rows at a time on each of 8 GPUs
accum = 4
lr = 0.002
warmup = 9_500        # half an epoch
