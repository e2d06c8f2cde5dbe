"""What trained models are used for: vectors of texts, neighbours, further words, sentences in between."""
