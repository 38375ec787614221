"""Every layout beside one plain process: what is compared, and how. `make verify` runs it.

problems.py     what is trained: a tiny GPT-2 on random sentences, a narrow VGG16 on noise
plain.py        the reference: one process, plain PyTorch
table.py        the rows: a name, how many ranks, what lays the model out, what it trains
compare.py      trains a row in the project's loop, and compares it with the reference
run.py          checks many rows, each on the ranks that it needs
"""
