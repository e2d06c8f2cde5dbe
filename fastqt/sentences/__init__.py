"""The wing of sentences: training, evaluation and search of sentence vectors.

It is a product of its own on top of the losses, and the rest of fastqt imports nothing from it. `text` reads
corpora and vocabularies. `runs` is a directory that training writes: settings, checkpoint, model. `inference`
embeds and searches with such a model, `evaluation` measures it, and `train` makes it. `cli` is the
command `fastqt`.

What a user gives and cannot be used, such as a file that is missing or damaged, or an option out of range,
raises an `fastqt.errors.InputError`, whose message names it. A docstring speaks of other errors alone.
"""
