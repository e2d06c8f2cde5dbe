"""What a directory that a training wrote holds: settings, checkpoints, and the model."""
