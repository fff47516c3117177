# ELF-L on OpenWebText (Tab. 3): 652 M parameters.
base = "config/owt_b.py"
name = "owt_l"
depth = 32
dim = 1280
heads = 16
steps = 57_000        # 3 epochs
accum = 4             # 16 rows at a time on each of 8 GPUs
