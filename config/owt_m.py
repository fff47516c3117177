# ELF-M on OpenWebText (Tab. 3): 343 M parameters.
base = "config/owt_b.py"
name = "owt_m"
depth = 24
dim = 1056
heads = 16
steps = 76_000        # 4 epochs
accum = 2             # 32 rows at a time on each of 8 GPUs
