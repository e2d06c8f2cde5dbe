"""How the sentence encoders are made of the settings of a run, compiled and exported."""
