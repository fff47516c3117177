# Short stories on one GPU, in an evening: 44 M parameters. Not run yet.
# python data/tinystories/prepare.py && python train.py config/stories.py
name = "stories"
data = "data/tinystories"
encoder = "t5-small"
length = 256

depth = 8
dim = 512
heads = 8
bottleneck = 128

steps = 50_000        # 7 epochs: 50 K x 256 x 256 tokens
batch_size = 256
accum = 2             # 128 rows at a time, for 24 GB
lr = 0.002
warmup = 2_000
