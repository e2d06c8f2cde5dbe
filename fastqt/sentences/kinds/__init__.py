"""The model kinds that a training can name: a module for those that share options; `runs.config` lists them.

No torch is imported before a model is built.
"""
