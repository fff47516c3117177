# ELF-B on XSum, from an article to its summary, as in the paper (Tab. 1 and 4).
# torchrun --nproc_per_node=8 train.py config/xsum.py
base = "config/de_en.py"
name = "xsum"
data = "data/xsum"
length = 1088
cond_length = 1024
steps = 39_900        # 100 epochs of 204,045 pairs
