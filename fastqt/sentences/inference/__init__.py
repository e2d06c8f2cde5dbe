"""Uses of a trained model: sentence vectors, search, vocabulary expansion, interpolation."""
