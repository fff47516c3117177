# Few steps: a student of the default run that takes 16 steps. lab/few_steps.py goes on to 1 step,
# by further rounds such as
# python train.py config/docs_pd.py --name=docs_pd_8 --init_from=out/docs_pd_16 --student_steps=8 \
#     --teacher_substeps=4 --sample_steps=8
base = "config/docs.py"
name = "docs_pd_16"
teacher = "out/docs"
init_from = "out/docs"
student_steps = 16
teacher_substeps = 2     # the paper has 4, of a teacher that takes 64 steps; here it takes 32

steps = 200
lr = 0.002
warmup = 20

sample_steps = 16
sample_gamma = 0.0       # few steps are too long for noise in between; less of it at the start
sample_gamma_power = 0.0
sample_temperature = 0.58
sample_w = 2.5
