"""The contents of a run's directory: the settings, the checkpoint and the model."""
